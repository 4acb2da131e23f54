"""Agents that know nothing of Bridge, through the real `openai` client and a fake server."""

import asyncio
import itertools
import json
import math
import re
import threading
import time
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.agents import agent_runs
from bridge.agents.recording import Recording, Turn, TurnRequest
from bridge.checkpoints.run_directory import RunDirectory
from bridge.engine import measuring
from bridge.errors import ServerUnreachableError
from bridge.learn import samples
from bridge.learn.policy_loss import LossSpec
from bridge.ranks.world import Ranks
from bridge.rollouts.sampler import CALL_SEEDS
from bridge.types import Completion, Group
from tests.models import chat
from tests.unit import agents_sample
from tests.unit.agents.test_trajectories import ANSWERED, FORMS, Rolled, check_experts, sleepers, spoken
from tests.unit.several_ranks import on_ranks

DOCUMENT = Path(__file__).parents[3] / "docs" / "environments.md"
FILE = Path(__file__).parents[1] / "agents_sample.py"
Words = Callable[[str], str]
TEXT = "The answer is 19, I think, user assistant. " * 5
SPEC = LossSpec(aggregation="token_mean", advantage_scale="group", clip_low=0.2, clip_high=0.2)


def end(name: str) -> str:
    return chat.ENDS[name[:5].rstrip("23_")]


def calling(name: str) -> Words:
    """Call the tool three times, then say that it is done."""

    def words(prompt: str) -> str:
        turn = sum(map(prompt.rpartition("Begin at ")[2].count, ANSWERED))
        if turn == 3:
            return f"It is done, at last.{end(name)}"
        return FORMS[name]("add", json.dumps({"text": f"{TEXT}#{turn}"}))

    return words


def saying(name: str, text: str = TEXT) -> Words:
    return lambda _: f"{text}{end(name)}"


def sequences(group: Group) -> list[tuple[list[int], Completion]]:
    made = [one for completion in group.completions for one in completion.sequences]
    return [([*group.prompt_token_ids, *one.token_ids], one) for one in made]


def check_tokens(ours: Rolled, groups: list[Group]) -> int:
    """Check that every token is one that the server sampled or read; return how often a sequence was extended."""
    num_other = num_extended = 0
    counted: list[tuple[list[int], list[int]]] = []
    for group in groups:
        for sequence, one in sequences(group):
            expected = [False] * len(sequence)
            turns = []
            for prompt, ids in ours.answers:
                if (
                    sequence[: len(prompt) + len(ids)] == [*prompt, *ids]
                    and (one.sampled or ())[len(prompt) - len(group.prompt_token_ids)]
                ):
                    turns.append((prompt, ids))
                    expected[len(prompt) : len(prompt) + len(ids)] = [True] * len(ids)
                    encoded = ours.tokenizer(ours.tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
                    num_other += encoded != ids
            assert turns
            assert len(sequence) == max(len(prompt) + len(ids) for prompt, ids in turns)
            assert one.sampled == tuple(expected[len(group.prompt_token_ids) :])
            assert [math.isnan(value) for value in one.logprobs] == [not own for own in one.sampled or ()]
            assert list(one.versions) == [3 if own else None for own in one.sampled or ()]
            num_extended += len(turns) - 1
            counted += turns
    assert sorted(counted) == sorted(ours.answers), "each turn is trained on once"
    assert num_other > len(ours.answers) / 3, "re-encoding would have changed most turns"
    return num_extended


@pytest.mark.parametrize("name", FORMS)
def test_tokens_of_a_run_are_those_sampled_and_read(tmp_path: Path, name: str) -> None:
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}} if name == "qwen3_training" else {}
    with spoken(tmp_path, calling(name), name, environment=f"{FILE}:Calling", max_new_tokens=4000, **off) as ours:
        groups = ours.stream.take(2, step=1)
        assert check_tokens(ours, groups) == 8 * 3
    assert ours.notes == []
    for group in groups:
        start = group.problem["start"]  # type: ignore[typeddict-item]
        assert group.rewards == pytest.approx((start + 3 * (len(TEXT) + 2) - 0.020,) * 4)
        assert group.reward_parts["brief"] == pytest.approx((-0.020,) * 4)
        assert {completion.num_turns for completion in group.completions} == {4}
        assert {completion.finish_reason for completion in group.completions} == {"stop"}


PROGRAM = """
import json, sys, urllib.request
base_url, prompt = sys.argv[1:]
try:
    import bridge
except ImportError:
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    with urllib.request.urlopen(f"{base_url}/chat/completions", body) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"])
else:
    raise SystemExit("this Python has Bridge")
"""


def test_agent_with_its_own_python_works_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n# other_python.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block
    venv.create(tmp_path / ".venv-agent", with_pip=False)
    (tmp_path / "other_python.py").write_text(block[1].replace(".venv-agent", f"{tmp_path}/.venv-agent"))
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = f"{tmp_path / 'other_python.py'}:InAnotherPython"

    def words(prompt: str) -> str:
        a, b = re.findall(r"user\n(\d\d)\+(\d\d)=", prompt)[-1]
        return f"{int(a) + int(b)}{end('qwen2_5')}"

    with spoken(tmp_path, words, environment=environment) as ours:
        groups = ours.stream.take(2, step=1)
    assert [group.rewards for group in groups] == [(1.0,) * 4] * 2
    (tmp_path / "program.py").write_text("raise ValueError('no such model')")
    with spoken(tmp_path, words, environment=environment) as ours:
        groups = ours.stream.take(2, step=1)
    faults = [unscored.fault for group in groups for unscored in group.unscored]
    assert len(faults) == 8
    assert all("raised RuntimeError: ValueError: no such model (other_python.py line" in fault for fault in faults)


def test_agent_in_the_docs_works_unchanged(tmp_path: Path) -> None:
    block = re.search(r"```python\n# agent.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "agent.py").write_text(block[1])

    def words(prompt: str) -> str:
        a, b = re.findall(r"user\n(\d\d)\+(\d\d)=", prompt)[-1]
        result = re.search(r"<tool_response>\n(\d+)\n", prompt)
        called = FORMS["qwen2_5"]("add", json.dumps({"a": int(a), "b": int(b)}))
        return f"{result[1]}{end('qwen2_5')}" if result else called

    with spoken(tmp_path, words, environment=f"{tmp_path}/agent.py:Adder") as ours:
        groups = ours.stream.take(2, step=1)
        assert check_tokens(ours, groups) == 8
    assert [group.rewards for group in groups] == [(1.0,) * 4] * 2


TEMPLATES = {
    "qwen2_5": True, "qwen3": False, "qwen3_off": False, "qwen3_training": True, "llama3": True, "gemma3": True,
    "mistral": True,
}  # fmt: skip
"""Name of a template -> whether it leaves earlier turns unchanged when the user goes on."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_that_changes_turns_starts_new_sequences(tmp_path: Path, name: str) -> None:
    is_off = name in ("qwen3_off", "qwen3_training")
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}} if is_off else {}
    thought = "<think>\nI see.\n</think>\n\n" if name == "qwen3" else ""
    words = saying(name, f"{thought}{TEXT}")
    template = name.removesuffix("_off")
    has_system = name != "mistral"
    environment = f"{FILE}:Chatting" if has_system else f"{FILE}:ChattingWithoutSystem"
    with spoken(tmp_path, words, template, environment=environment, max_new_tokens=4000, **off) as ours:
        groups = ours.stream.take(2, step=1)
        num_extended = check_tokens(ours, groups)
        prompts = [ours.tokenizer.decode(prompt) for prompt, _ in ours.answers]
    (longest, *_) = sorted(prompts, key=len, reverse=True)
    for question in ("Begin at ", "And then?", "And at last?"):
        assert question in longest
    assert longest.count("The answer is 19") == 2 * 5
    assert "I see." not in longest, "the template drops earlier thoughts, and the client got them apart"
    completions = [completion for group in groups for completion in group.completions]
    assert {len(completion.sequences) for completion in completions} == ({1} if TEMPLATES[name] else {3})
    assert num_extended == (8 * 2 if TEMPLATES[name] else 0)
    assert {completion.num_turns for completion in completions} == {3}
    expected_notes = (
        [] if TEMPLATES[name] else [f"the chat template of {tmp_path} changes an earlier turn once an agent's next"]
    )
    assert [line[: len(expected)] for line, expected in zip(ours.notes, expected_notes, strict=True)] == expected_notes
    assert all(group.rewards == (6.0 + has_system,) * 4 for group in groups)


def test_sequences_of_a_run_share_a_reward_and_count_once(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Branching", max_new_tokens=4000) as ours:
        groups = ours.stream.take(2, step=1)
        num_extended = check_tokens(ours, groups)
    assert num_extended == 8 * 2, "the second turn and the third after it; the other is read, and goes on alone"
    for group in groups:
        assert group.rewards == (group.problem["start"] + 4.0,) * 4  # type: ignore[typeddict-item]
        assert {len(completion.sequences) for completion in group.completions} == {4}
        assert {completion.num_turns for completion in group.completions} == {6}
    uneven = Group(**{**vars(groups[0]), "rewards": (0.0, 1.0, 0.0, 0.0)})
    made = samples.samples([uneven], SPEC, max_new_tokens=4000)
    assert len(made) == 4 * 4
    assert sum(len(sample.sampled_logprobs) for sample in made) == sum(
        sample.num_sampled for sample in uneven.completions
    )
    assert len({sample.advantages[0] for sample in made}) == 2
    assert sum(sample.advantages[0] > 0 for sample in made) == 4, "of one run of four, whatever its sequences"
    assert sum(len(sample.sampled_logprobs) * sample.weight for sample in made) == pytest.approx(1)
    of_runs = samples.samples([uneven], replace(SPEC, aggregation="sequence_mean"), max_new_tokens=4000)
    shares = [
        sum(len(sample.sampled_logprobs) * sample.weight for sample in of_runs[at : at + 4]) for at in (0, 4, 8, 12)
    ]
    assert shares == pytest.approx([0.25] * 4)
    evaluation = measuring.evaluation(groups, step=0, version=3, seconds=1)
    assert (evaluation.turns_mean, evaluation.unscored) == (6, 0)
    assert evaluation.completion_tokens_mean == sum(len(ids) for _, ids in ours.answers) / 8
    run = RunDirectory.create(tmp_path / "run", environment="agents")
    run.append_rollouts(1, groups)
    (line, _) = map(json.loads, run.rollouts.read_text().splitlines())
    assert line["completions"][0]["weight_version"] == 3
    written, one = line["completions"][0], groups[0].completions[0]
    assert one.text.count("\n---\n") == 3
    turns = written["turns"]
    assert sum(turn["tokens"] for turn in turns if "tokens" in turn) == one.num_sampled
    assert {turn["sequence"] for turn in turns} == {0, 1, 2, 3}
    assert [turn["messages"] for turn in turns if turn["role"] == "repeated"] == [3]
    assert sum(turn["text"] == "And then?" for turn in turns) == 2
    assert written["text"] == turns[-1]["text"] == TEXT


def test_every_sequence_has_experts_for_all_its_tokens(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"environment": f"{FILE}:Branching", "max_new_tokens": 4000, "reports_experts": True}
    with spoken(tmp_path, saying("qwen2_5"), **choices) as ours:
        groups = ours.stream.take(2, step=1)
    for group in groups:
        for sequence in (one for completion in group.completions for one in completion.sequences):
            check_experts(ours, sequence, len(group.prompt_token_ids))


def test_turn_keeps_only_the_experts_of_its_own_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = list[Turn]()

    class Watched(Recording):
        def add(self, request: TurnRequest, completion: Completion) -> dict[str, Any]:
            message = super().add(request, completion)
            turns.append(self.turns[-1])
            return message

    monkeypatch.setattr(agent_runs, "Recording", Watched)
    choices: dict[str, Any] = {"environment": f"{FILE}:Branching", "max_new_tokens": 4000, "reports_experts": True}
    with spoken(tmp_path, saying("qwen2_5"), **choices) as ours:
        ours.stream.take(2, step=1)
    followed = [turn for turn in turns if turn.request.before is not None and turn.completion.experts]
    assert followed
    for turn in followed:
        num_own = len(turn.request.added) + len(turn.completion.token_ids)
        assert len(np.frombuffer(turn.completion.experts, "<i2")) == num_own


def test_call_that_cannot_be_read_reaches_the_agent_as_text(tmp_path: Path) -> None:
    def words(_: str) -> str:
        return "<tool_call>\n{'name': 'add', 'arguments': {'text': 'abc'}}\n</tool_call><|im_end|>"

    with spoken(tmp_path, words, environment=f"{FILE}:Calling") as ours:
        groups = ours.stream.take(2, step=1)
    assert {one.tool_errors for group in groups for one in group.completions} == {1}
    assert len([note for note in ours.notes if "in a form that cannot be read" in note]) == 1


def test_run_may_send_concurrent_requests(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"max_new_tokens": 4000, "reward_processes": 2, "max_turns": 4}
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Parallel", **choices) as ours:
        groups = ours.stream.take(2, step=1)
        assert check_tokens(ours, groups) == 0
        seeds = [request.body["seed"] for request in ours.requests if request.method == "POST"]
    assert len(set(seeds)) == len(seeds) == 8 * 4
    assert [group.rewards for group in groups] == [(float(len(TEXT)),) * 4] * 2
    assert {len(completion.sequences) for group in groups for completion in group.completions} == {4}


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(("direct", "is_direct"), [("", 0.0), ("example.com, 127.0.0.1", 0.0), ("*", 1.0)])
def test_base_url_is_reached_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str, is_direct: float, processes: int
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, direct)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    choices: dict[str, Any] = {"max_new_tokens": 4000, "reward_processes": processes}
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Proxied", **choices) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert group.rewards == (is_direct,) * 4


def test_runs_in_this_process_are_concurrent(tmp_path: Path) -> None:
    size = agents_sample.Meeting.SIZE
    choices: dict[str, Any] = {"batch_size": size, "group_size": size, "reward_processes": 0}
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Meeting", **choices) as ours:
        (group,) = ours.stream.take(1, step=1)
    assert group.rewards == (1.0,) * size


def shares(ranks: Ranks, folder: Path) -> Any:
    """Return a rank's groups of two steps and an evaluation, its own turns, and its worker processes."""
    own = folder / str(ranks.rank)
    own.mkdir()
    choices: dict[str, Any] = {"gpus": 4, "batch_size": 4, "group_size": 2, "max_new_tokens": 4000, "eval_samples": 2}
    choices |= {"environment": f"{FILE}:Calling", "reward_processes": None, "max_staleness": 1}
    with spoken(own, calling("qwen2_5"), ranks=ranks, **choices) as ours:
        num_workers = len(ours.stream._scorer._workers)
        steps = [ours.stream.take(2, step=step) for step in (1, 2)]
        evaluated = ours.stream.evaluate(step=2)
        return steps, evaluated, [(*prompt, *ids) for prompt, ids in ours.answers], num_workers


def test_each_replica_runs_its_share_of_the_agents(tmp_path: Path) -> None:
    results = on_ranks(4, shares, tmp_path, tp_size=2)
    steps, evaluated, *_ = results[0]
    assert all(repr(result[:2]) == repr((steps, evaluated)) for result in results), "all ranks have the same groups"
    assert len({group.problem["start"] for group in itertools.chain(*steps)}) == 2 * 2
    assert [bool(turns) for _, _, turns, _ in results] == [True, False, True, False]
    read = {turn for _, _, turns, _ in results for turn in turns}
    groups = [*itertools.chain(*steps), *evaluated]
    assert all(tuple(sequence) in read for group in groups for sequence, _ in sequences(group))
    assert [num > 0 for *_, num in results] == [True, False, True, False]
    assert results[0][-1] == 4 // 2


@pytest.mark.parametrize("processes", [0, 1])
def test_agents_reward_may_come_from_score_method(tmp_path: Path, processes: int) -> None:
    words, environment = saying("qwen2_5"), f"{FILE}:Scored"
    with spoken(tmp_path, words, environment=environment, reward_processes=processes, eval_samples=2) as ours:
        (group, *_) = ours.stream.take(2, step=1)
        first, second = (ours.stream.evaluate(step=step) for step in (0, 4))
    assert group.rewards == tuple(len(sequence) for sequence, _ in sequences(group))
    assert repr(first) == repr(second)  # NaN is not equal to itself
    with spoken(tmp_path, words, environment=environment, reward_processes=processes, reward="format") as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert group.rewards == (0.0,) * 4
    assert group.reward_parts == {"format": (0.0,) * 4}


def test_stream_reports_usage_only_on_request(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Streaming") as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert group.rewards == (float(len(TEXT)),) * 4


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_per_turn_rewards_need_a_single_sequence(tmp_path: Path, name: str) -> None:
    environment, words = f"{FILE}:PerTurn", saying(name, f"<think>\nI see.\n</think>\n\n{TEXT}")
    with spoken(tmp_path, words, name, environment=environment, max_new_tokens=4000) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    if name == "qwen2_5":
        assert group.rewards == (1.5,) * 4
        assert group.turn_rewards == ((0.0, 0.5, 1.0),) * 4
    else:
        expected = "rewards per turn for a run of 3 token sequences, expected one sequence"
        assert {failure.fault.partition(", on")[0] for failure in group.unscored} == {expected}


def test_requests_are_answered_as_the_protocol_defines(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Listing") as ours:
        groups = ours.stream.take(2, step=1)
        bodies = [request.body for request in ours.requests if request.method == "POST"]
    assert [group.rewards for group in groups] == [(1.0,) * 4] * 2
    assert {body["max_tokens"] for body in bodies} == {3}
    assert {body["temperature"] for body in bodies} == {1.0}
    (line,) = ours.notes
    assert line.startswith("an agent sets temperature in a request, which is ignored")


def test_run_at_a_limit_is_scored_as_truncated(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"max_turns": 2, "max_new_tokens": 4000}, 2),
        ({"max_new_tokens": 500}, 3),
    ]
    for limits, num_turns in cases:
        with spoken(tmp_path, calling("qwen2_5"), environment=f"{FILE}:Calling", **limits) as ours:
            (group, *_) = ours.stream.take(2, step=1)
        assert len(group.rewards) == 4
        assert {completion.finish_reason for completion in group.completions} == {"length"}
        assert {completion.num_turns for completion in group.completions} == {num_turns}
        assert all(len(completion.token_ids) <= limits["max_new_tokens"] for completion in group.completions)


def test_request_that_does_not_fit_the_server_hits_a_limit(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Chatting", max_model_len=400) as ours:
        (group, *_) = ours.stream.take(2, step=1)
        bodies = [request.body for request in ours.requests if request.method == "POST"]
    assert max(len(body["prompt"]) + body["max_tokens"] for body in bodies) == 400
    assert {completion.finish_reason for completion in group.completions} == {"length"}
    assert len(group.rewards) == 4


def test_lone_surrogate_becomes_replacement_character(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:HalfCharacters") as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert group.rewards == (1.0,) * 4
    assert ours.tokenizer.decode(ours.answers[0][0]).count("\ufffd") == 4
    assert group.completions[0].text.startswith("user: Begin at")
    assert group.completions[0].text.count("\ufffd") == 2


HARMLESS = ("returns", "prints", "forks")
FAULTS = {
    "raises": "Misbehaving.run raised ValueError: two lines (agents_sample.py line ",
    "cancels": "Misbehaving.run raised CancelledError (agents_sample.py line ",
    "exits": "Misbehaving.run raised SystemExit: 3 (agents_sample.py line ",
    "answers": "Misbehaving.run returned '1.0', expected a finite number, one per turn, or a dict of finite",
    "forgets": "Misbehaving.run returned None, expected a finite number, one per turn, or a dict of finite",
    "asks_two": "Misbehaving.run raised BadRequestError: Error code: 400 - n=2 is not supported while a run is recorded"
    " for training (agents_sample.py line ",
}


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(("kind", "reward"), [("Parsing", 0.0), ("ParsingScored", 3.0)])
def test_client_that_raises_on_truncation_counts_as_truncated(
    tmp_path: Path, kind: str, reward: float, processes: int
) -> None:
    choices: dict[str, Any] = {"max_new_tokens": 20, "reward_processes": processes, "batch_size": 4}
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:{kind}", **choices) as ours:
        (group,) = ours.stream.take(1, step=1)
    assert group.rewards == (reward,) * 4
    assert {completion.finish_reason for completion in group.completions} == {"length"}


def test_client_that_continues_at_a_limit_counts_as_truncated(tmp_path: Path) -> None:
    with spoken(tmp_path, lambda _: "spins<|im_end|>", environment=f"{FILE}:Misbehaving", batch_size=4) as ours:
        (group,) = ours.stream.take(1, step=1)
    assert group.rewards == (0.0,) * 4
    assert {completion.finish_reason for completion in group.completions} == {"length"}


@pytest.mark.parametrize("processes", [0, 1])
def test_error_in_a_run_fails_only_that_run(tmp_path: Path, processes: int) -> None:
    does = [*HARMLESS, *FAULTS]

    def words(prompt: str) -> str:
        return f"{next((does[n] for n in range(len(does)) if f'Begin at {n}' in prompt), 'returns')}<|im_end|>"

    with spoken(tmp_path, words, environment=f"{FILE}:Misbehaving", reward_processes=processes, batch_size=40) as ours:
        groups = ours.stream.take(10, step=1)
    for group in groups:
        how = [*does, "returns"][group.problem["start"]]  # type: ignore[typeddict-item]
        if how in HARMLESS:
            assert group.rewards == (1.0,) * 4
        else:
            assert [failure.fault[: len(FAULTS[how])] for failure in group.unscored] == [FAULTS[how]] * 4
            assert all("\n" not in failure.fault for failure in group.unscored)
            assert all(f"assistant: {how}" in failure.completion.text for failure in group.unscored), (
                "what it said is kept"
            )
    assert len(ours.notes) == len(FAULTS) - 1, "two of them return something other than a reward"


def test_agent_that_hangs_or_dies_fails_only_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTED_IN", str(tmp_path))

    def words(prompt: str) -> str:
        how = {"Begin at 3": "hangs", "Begin at 4": "dies"}
        return f"{next((does for text, does in how.items() if text in prompt), 'returns')}<|im_end|>"

    with spoken(
        tmp_path, words, environment=f"{FILE}:Misbehaving", reward_processes=3, tool_timeout_s=4.0, batch_size=12,
        group_size=2,
    ) as ours:  # fmt: skip
        groups = ours.stream.take(6, step=1)
        assert not sleepers(tmp_path), "what it started has ended, too"
    faults = {group.problem["start"]: {failure.fault[:55] for failure in group.unscored} for group in groups}  # type: ignore[typeddict-item]
    assert {key for key, kinds in faults.items() if kinds} == {3, 4}
    assert faults[3] == {"the agent's run took longer than 4 s (agents_sample.py "}
    assert {fault.partition(", on prompt")[0] for fault in faults[4]} == {"the agent's run exited with status 7"}


def test_agents_time_limit_excludes_sampling(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def words(prompt: str) -> str:
        if "And then?" not in prompt:
            time.sleep(7)
        return saying("qwen2_5")(prompt)

    choices: dict[str, Any] = {"reward_processes": 2, "tool_timeout_s": 6.0, "max_new_tokens": 4000, "batch_size": 4}
    with spoken(tmp_path, words, environment=f"{FILE}:Chatting", **choices) as ours:
        (group,) = ours.stream.take(1, step=1)
    assert group.rewards == (7.0,) * 4
    assert capfd.readouterr().err == "", "a client that is left open makes no noise"


def test_server_failure_ends_the_step_not_the_agent(tmp_path: Path) -> None:
    is_well = threading.Event()

    def words(prompt: str) -> str:
        if "<tool_response>" in prompt and not is_well.is_set():
            raise ValueError("the connection is dropped")
        return calling("qwen2_5")(prompt)

    with spoken(tmp_path, words, environment=f"{FILE}:Calling", max_new_tokens=4000, reward_processes=2) as ours:
        with pytest.raises(ServerUnreachableError):
            ours.stream.take(1, step=1)
        is_well.set()
        ours.answers.clear()
        groups = ours.stream.take(1, step=1)
        check_tokens(ours, groups)
    assert len(groups[0].rewards) == 4


def test_runs_continue_while_a_step_is_computed(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"max_staleness": 2, "reward_processes": 2, "max_new_tokens": 4000, "max_turns": 5}
    with spoken(tmp_path, calling("qwen2_5"), environment=f"{FILE}:Calling", **choices) as ours:
        groups = [group for step in (1, 2, 3) for group in ours.stream.take(2, step=step)]
        assert ours.stream.num_in_flight > 0
    read = {(*prompt, *ids) for prompt, ids in ours.answers}
    assert all(tuple(sequence) in read for group in groups for sequence, _ in sequences(group))
    assert {completion.num_turns for group in groups for completion in group.completions} == {4}
    seeds = [request.body["seed"] % CALL_SEEDS for request in ours.requests if request.method == "POST"]
    assert {seed % 5 for seed in seeds} == {0, 1, 2, 3}, "each turn of each run has a seed of its own"


def test_closing_a_stream_starts_no_new_run(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"max_staleness": 4, "reward_processes": 0, "batch_size": 8, "group_size": 2}
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Chatting", max_new_tokens=4000, **choices) as ours:
        ours.stream.take(4, step=1)
        run = ours.stream._group_sampler._recorder.run  # type: ignore[attr-defined]

        async def later() -> None:
            await asyncio.sleep(60)
            async with run(None):
                pass

        async def leave() -> None:
            tasks.append(asyncio.create_task(later()))

        tasks: list[Any] = []
        ours.stream._sampler.loop.run(leave())
    assert tasks[0].cancelled()


def test_agent_without_requests_is_not_scored(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("qwen2_5"), environment=f"{FILE}:Silent") as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert group.rewards == ()
    assert {failure.fault.partition(",")[0] for failure in group.unscored} == {
        "the agent's run ended without requesting a turn of the model from its base_url"
    }


def test_request_that_outlives_its_run_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTED_IN", str(tmp_path))
    are_over = threading.Event()

    def words(prompt: str) -> str:
        if requested := re.search(r"slowly (\w+)", prompt):
            (tmp_path / requested[1]).touch()
            assert are_over.wait(60)
        return "leaves<|im_end|>"

    with spoken(tmp_path, words, environment=f"{FILE}:Misbehaving", batch_size=4) as ours:
        (group,) = ours.stream.take(1, step=1)
        are_over.set()
        assert len([request for request in ours.requests if request.method == "POST"]) == 8
    assert group.rewards == (1.0,) * 4
    assert {completion.num_turns for completion in group.completions} == {1}


def test_tools_without_template_support_are_refused(tmp_path: Path) -> None:
    with spoken(tmp_path, saying("gemma3"), "gemma3", environment=f"{FILE}:Calling") as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert all("writes a tool call as" in failure.fault for failure in group.unscored)
    assert len(group.unscored) == 4
