"""Groups from a fake server, scored here and in workers, and what is kept if scoring or the server fails."""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.config import TrainConfig
from bridge.engine import measuring
from bridge.errors import RewardError, ServerUnreachableError
from bridge.learn.samples import with_advantages
from bridge.rollouts.problems import endless
from bridge.rollouts.stream import EnvironmentStream
from bridge.scoring.score import Scores
from bridge.server.endpoint import Endpoint
from bridge.types import Group, Problem, TrainedProblems
from bridge.types import Task as BridgeTask
from bridge.weights import skeleton
from tests.logged import logged
from tests.models import tiny
from tests.streams import environment_stream
from tests.unit.http_server import HttpRequest, serving
from tests.unit.openai_server import Bend, openai, unbent
from tests.unit.scores_sample import Sample

WORDS = ("good", "raises", "is_nan", "fine", "spins", "dies", "a part", "well")
"""The server's answers, one per completion; some are methods of the sample."""
PATIENCE_S = 60.0
Score = Callable[[Problem, str], float]


class Task:
    """Has numbered problems, and scores with a given function."""

    def __init__(self, score: Score = lambda _, text: float(len(text))) -> None:
        self._score = score

    def __iter__(self) -> Iterator[Problem]:
        for number in range(3):
            yield {"prompt": "say" + "!" * number}

    def held_out(self) -> list[Problem]:
        return [{"prompt": "say more"}, {"prompt": "say less"}]

    def score(self, problem: Problem, completion: str) -> float:
        return self._score(problem, completion)


@dataclass
class Sampled:
    """The stream of a fake server."""

    stream: EnvironmentStream
    endpoint: Endpoint
    requests: list[HttpRequest]
    notes: list[str]
    progress: list[tuple[int, int]]

    def groups(self, step: int = 1, count: int = 3) -> list[Group]:
        return self.stream.take(count, step=step)

    @property
    def seeds(self) -> list[int]:
        return sorted(request.body["seed"] for request in self.requests if request.method == "POST")


def saying(bend: Bend = unbent) -> Bend:
    """Let the server answer with the words."""

    def bent(document: dict[str, Any], request: HttpRequest) -> Any:
        for choice in document["choices"]:
            choice["text"] = WORDS[choice["index"]]
        return bend(document, request)

    return bent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.write(tiny.llama(), folder)
    return folder


@contextmanager
def sampled(
    model: Path, task: Task, bend: Bend, recipe: Callable[[], Scores] | None = None, **choices: Any
) -> Iterator[Sampled]:
    fixed: dict[str, Any] = {"model_name": str(model), "batch_size": 24, "group_size": 8, "max_new_tokens": 8}
    config = TrainConfig.of(**(fixed | {"max_unscored_share": 1.0, "max_retries": 0} | choices))
    progress: list[tuple[int, int]] = []
    given = replace(BridgeTask.of(task), recipe=recipe, in_workers=True) if recipe else task
    stream = environment_stream(config, given, progress=lambda *done: progress.append(done))
    with serving(openai(bend)) as server, logged() as notes, closing(stream):
        endpoint = Endpoint(url=server.url)
        stream.served(endpoint, 3)
        yield Sampled(stream, endpoint, server.requests, notes, progress)


def test_unscored_completions_are_left_out_and_reported_once(model: Path, tmp_path: Path) -> None:
    recipe = partial(Sample, tmp_path / "log")
    choices = {"reward_processes": 4, "reward_timeout_s": 2.0}
    with sampled(model, Task(), saying(), recipe, **choices) as ours:
        first = ours.groups(step=1)
        second = ours.groups(step=2, count=1)
    order = list(islice(endless(Task(), seed=0), 4))
    assert [(group.number, group.problem) for group in (*first, *second)] == list(enumerate(order))
    for groups in (first, second):
        for group in groups:
            kept = [completion.text for completion in group.completions]
            left_out = [one.completion.text for one in group.unscored]
            assert kept == ["good", "fine", "a part", "well"]
            assert list(group.rewards) == [4, 4, 6, 4]
            assert left_out == ["raises", "is_nan", "spins", "dies"]
            assert [one.fault.partition(" (")[0] for one in group.unscored] == [
                "Sample.score raised ValueError: could not convert string to float: 'seven'",
                "Sample.score returned nan, expected a finite number",
                "Sample.score took longer than 2 s",
                "Sample.score exited with status 3",
            ]
    begun = [line.split(" ", 1)[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(begun) == sorted([*WORDS] * 4), "each was scored once"
    assert len(ours.notes) == 4
    assert all(line.startswith("step 1: 3 completions without a reward left out: Sample.score") for line in ours.notes)
    assert ours.progress == [(1, 3), (2, 3), (3, 3), (1, 1)]


def test_too_many_failed_scores_name_the_commonest_fault(model: Path) -> None:
    def score(_: Problem, text: str) -> float:
        return {"good": 1.0, "fine": 2.0}.get(text, float("nan")) if text != "raises" else 1 / 0

    with sampled(model, Task(score), saying(), max_unscored_share=0.2) as ours, pytest.raises(RewardError) as caught:
        ours.groups(step=7)
    message = caught.value.message
    known = (
        "step 7: at least (6|12|18) of 24 completions have no reward, more than the allowed fraction of 0.2;"
        " (5|10|15) of "
    )
    assert re.match(known, message), message  # by how many groups were scored at once
    assert "of them: Task.score returned nan, expected a finite number (test_stream.py line " in message
    assert message.endswith(" and completion 'is_nan'")
    assert "\n" not in message


def test_group_is_scored_while_others_are_still_sampled(model: Path) -> None:
    scored = threading.Event()

    def score(_: Problem, text: str) -> float:
        scored.set()
        return 1.0

    def bend(document: dict[str, Any], request: HttpRequest) -> Any:
        if len(request.body["prompt"]) > 3:  # the others are answered once the first is scored
            assert scored.wait(PATIENCE_S)
        return document

    with sampled(model, Task(score), saying(bend)) as ours:
        assert [group.rewards for group in ours.groups()] == [(1.0,) * 8] * 3


def test_failed_step_is_sampled_again_from_the_start(model: Path) -> None:
    alive = threading.Event()

    def bend(document: dict[str, Any], request: HttpRequest) -> Any:
        return document if alive.is_set() or len(request.body["prompt"]) < 5 else None

    with sampled(model, Task(), saying(bend)) as ours:
        with pytest.raises(ServerUnreachableError):
            ours.groups()
        alive.set()
        groups = ours.groups()
        seeds = set(ours.seeds)  # of both calls: a request of the first one may arrive late
    with sampled(model, Task(), saying()) as undisturbed:
        assert undisturbed.groups() == groups
        assert set(undisturbed.seeds) == seeds
        assert len(undisturbed.seeds) == len(seeds) == 3


def test_resumed_run_skips_exactly_the_trained_problems(model: Path) -> None:
    with sampled(model, Task(), saying()) as straight:
        groups = [group for step in (1, 2, 3) for group in straight.groups(step=step)]
    trained = TrainedProblems().including([0, 1, 2, 4, 7])
    assert trained == TrainedProblems(below=3, beyond=frozenset({4, 7}))
    with sampled(model, Task(), saying()) as resumed:
        resumed.stream.resume(trained)
        resumed_groups = [group for step in (2, 3) for group in resumed.groups(step=step, count=2)]
    assert [group.number for group in resumed_groups] == [3, 5, 6, 8]
    assert [group.problem for group in resumed_groups] == [groups[number].problem for number in (3, 5, 6, 8)]


def test_next_version_may_be_at_another_endpoint(model: Path) -> None:
    with sampled(model, Task(), saying()) as ours:
        assert {version for group in ours.groups() for one in group.completions for version in one.versions} == {3}
        ours.stream.served(Endpoint(url=ours.endpoint.url, model="adapter-4", version=4), 4)
        assert {version for group in ours.groups(2) for one in group.completions for version in one.versions} == {4}
    assert [request.body["model"] for request in ours.requests if request.method == "POST"] == ["tiny"] * 3 + [
        "adapter-4"
    ] * 3


def test_retries_include_those_before_a_step_failed(model: Path) -> None:
    drops = [True] * 5  # both tries of the first two calls, and one of the third

    def bend(document: dict[str, Any], request: HttpRequest) -> Any:
        return None if len(request.body["prompt"]) == 3 and drops and drops.pop() else document

    with sampled(model, Task(), saying(bend), max_retries=1) as ours:
        for _ in range(2):
            with pytest.raises(ServerUnreachableError):
                ours.groups(step=1)
        ours.groups(step=1)
        assert ours.stream.num_retries == 3
        ours.groups(step=2)
        assert ours.stream.num_retries == 0


def test_different_seeds_share_no_step_or_evaluation(model: Path) -> None:
    """Otherwise step 1 with `--seed 1` would sample what step 2 with `--seed 0` samples."""
    seeds = list[int]()
    for seed in (0, 1, 2):
        with sampled(model, Task(), saying(), seed=seed, eval_samples=3) as ours:
            ours.stream.evaluate(step=0)
            for step in (1, 2, 3):
                ours.groups(step=step)
            seeds += ours.seeds
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**62


def test_evaluations_repeat_requests_and_count_scores(model: Path) -> None:
    def score(_: Problem, text: str) -> float:
        return {"good": 1.0, "raises": 4.0}.get(text, float("nan"))

    with sampled(model, Task(score), saying(), eval_samples=3) as ours:
        first = ours.stream.evaluate(step=0)
        seeds = ours.seeds
        ours.requests.clear()
        ours.groups(step=1)
        assert not set(seeds) & set(ours.seeds)
        ours.requests.clear()
        second = ours.stream.evaluate(step=5)
        assert ours.seeds == seeds
    assert first is not None
    assert second is not None
    assert [group.number for group in first] == [None, None]
    evaluation, repeated = (measuring.evaluation(groups, step=5, version=8, seconds=1) for groups in (first, second))
    assert evaluation == repeated
    assert (evaluation.reward_mean, evaluation.reward_std, evaluation.unscored, evaluation.num_problems) == (
        2.5,
        1.5,
        2,
        2,
    )
    assert (repeated.reward_mean, repeated.completion_tokens_mean, repeated.truncated_share) == (2.5, 3, 0)
    assert ours.notes[0].startswith("evaluation after step 0: 2 completions without a reward left out: ")


def test_chat_template_arguments_are_used_everywhere(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chat(Task):
        def __iter__(self) -> Iterator[Problem]:
            yield {"prompt": [{"role": "user", "content": "1+2"}]}

        def held_out(self) -> list[Problem]:
            return [*self]

    tokenizer = skeleton.tokenizer(str(model))
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ cue }}"
    monkeypatch.setattr(skeleton, "tokenizer", lambda _: tokenizer)
    choices: dict[str, Any] = {"eval_samples": 3, "batch_size": 8, "stop": ["x"]}
    with sampled(model, Chat(), saying(), chat_template_kwargs={"cue": "=>"}, **choices) as ours:
        ours.groups(count=1)
        ours.stream.evaluate(step=1)
    bodies = [request.body for request in ours.requests if request.method == "POST"]
    assert [body["prompt"] for body in bodies] == [tokenizer.convert_tokens_to_ids(list("1+2=>"))] * 2
    assert [body["stop"] for body in bodies] == [["x"]] * 2


@pytest.mark.parametrize(("choices", "temperature"), [({}, 0.7), ({"eval_temperature": 0.25}, 0.25)])
def test_evaluation_may_have_a_separate_temperature(model: Path, choices: dict[str, Any], temperature: float) -> None:
    with sampled(model, Task(), saying(), temperature=0.7, eval_samples=3, **choices) as ours:
        ours.stream.evaluate(step=0)
        ours.groups()
        ours.stream.evaluate(step=1)
    temperatures = [request.body["temperature"] for request in ours.requests if request.method == "POST"]
    assert temperatures == [temperature] * 2 + [0.7] * 3 + [temperature] * 2


def test_pass_at_k_is_the_share_of_draws_with_a_pass(model: Path) -> None:
    """Of 5 completions, 2 of one problem pass, and none of the other; of its draws of 2, 3 of 10 have none."""

    def score(problem: Problem, text: str) -> float:
        return 0.9 * (text in ("good", "fine")) * (problem["prompt"] == "say less") + 0.1 * (text != "raises")

    with sampled(model, Task(score), saying(), eval_samples=5) as ours:
        groups = ours.stream.evaluate(step=0) or []
    evaluation = measuring.evaluation(groups, step=0, version=1, seconds=1)
    assert evaluation.pass_at_k == pytest.approx({"1": 0.2, "2": 0.35, "4": 0.5, "5": 0.5})
    assert evaluation.curves()["held_out/pass_at_2"] == pytest.approx(0.35)
    lower = measuring.evaluation(groups, step=0, version=1, seconds=1, pass_reward=0.1)
    assert lower.pass_at_k == pytest.approx({"1": 0.8, "2": 1.0, "4": 1.0, "5": 1.0})
    (_, less) = groups
    few = replace(less, completions=less.completions[:2], rewards=(0.0, 1.0))
    assert measuring.pass_at([groups[0], few], 4, 0.1) == 1.0, "a problem with fewer than k is left out"
    assert math.isnan(measuring.pass_at([few], 4, 0.1))


def test_nothing_is_evaluated_by_default(model: Path) -> None:
    with sampled(model, Task(), saying()) as ours:
        assert ours.stream.evaluate(step=0) is None
        assert ours.requests == []


def test_reward_parts_are_those_of_the_kept_completions(model: Path) -> None:
    class Parts(Task):
        def scores(self, problem: Problem, completion: str) -> tuple[float, dict[str, float]]:
            number = float(WORDS.index(completion))
            return float("nan") if number == 1 else number, {"number": number} | ({"odd": 1.0} if number % 2 else {})

    with sampled(model, Parts(), saying()) as ours:
        for group in ours.groups():
            assert list(group.rewards) == [0, 2, 3, 4, 5, 6, 7]
            assert group.reward_parts["number"] == group.rewards
            assert [math.isnan(part) for part in group.reward_parts["odd"]] == [
                True,
                True,
                False,
                True,
                False,
                True,
                False,
            ]
            assert measuring._of_rollouts([group])["reward_parts"]["odd"] == 1
            assert len(group.unscored) == 1


def test_groups_train_on_the_remaining_completions(model: Path) -> None:
    def score(problem: Problem, text: str) -> float:
        kept = {"say": WORDS, "say!": WORDS[:1], "say!!": ()}[str(problem["prompt"])]
        return float(WORDS.index(text)) if text in kept else float("nan")

    with sampled(model, Task(score), saying()) as ours:
        groups = {str(group.problem["prompt"]): group for group in ours.groups()}
    assert [len(groups[prompt].rewards) for prompt in ("say", "say!", "say!!")] == [8, 1, 0]
    for scale in ("group", "batch", "none"):
        filled = with_advantages(list(groups.values()), scale)
        by_prompt = {str(group.problem["prompt"]): group.advantages for group in filled}
        assert by_prompt["say!!"] == ()
        assert by_prompt["say!"] == ((0.0,),)
        assert sum(value for (value,) in by_prompt["say"] or ()) == pytest.approx(0)


def test_interrupt_while_scoring_leaves_no_process(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def interrupt() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not (log.exists() and "spins" in log.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with sampled(model, Task(), saying(), partial(Sample, log), reward_processes=2) as ours:
        with pytest.raises(KeyboardInterrupt):
            ours.groups()
        thread.join()
    scoring = {int(line.split()[0]) for line in log.read_text().splitlines()}
    assert scoring
    assert not any(psutil.pid_exists(pid) for pid in scoring)


def test_completion_near_the_length_limit_loses_reward(model: Path) -> None:
    """Lengths 3, 6, 7 and 8 of at most 8, with a buffer of 4."""
    lengths = (3, 6, 7, 8, 3, 3, 3, 3)

    def bend(document: dict[str, Any], _: HttpRequest) -> Any:
        for choice in document["choices"]:
            length = lengths[choice["index"]]
            choice |= {"token_ids": [40] * length, "logprobs": {"token_logprobs": [-1.0] * length}}
        return document

    with sampled(model, Task(lambda *_: 1.0), bend, overlong_buffer=4, overlong_penalty=0.5, eval_samples=8) as ours:
        (group, *_) = ours.groups()
        assert group.rewards == (1.0, 0.75, 0.625, 0.5, 1.0, 1.0, 1.0, 1.0)
        assert group.reward_parts == {"overlong": (0.0, -0.5, -0.75, -1.0, 0.0, 0.0, 0.0, 0.0)}
        (held_out, *_) = ours.stream.evaluate(step=1) or []
        assert set(held_out.rewards) == {1.0}
    with pytest.raises(ValueError, match="--overlong-buffer 9 is longer than the longest completion, 8 tokens"):
        TrainConfig.of(model_name="m", max_new_tokens=8, overlong_buffer=9)
