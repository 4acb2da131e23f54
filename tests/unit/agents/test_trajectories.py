"""Trajectories with tools and a fake server: the exact sampled tokens are kept, and failing tools stay isolated."""

import base64
import json
import math
import os
import pickle
import random
import re
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from bridge.agents.tool_calls import Call
from bridge.agents.trajectories import DEEPEST, as_turn
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.engine import measuring
from bridge.learn import samples
from bridge.learn.policy_loss import LossSpec
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.problems import endless
from bridge.rollouts.sampler import CALL_SEEDS
from bridge.rollouts.stream import EnvironmentStream
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Group, TrainedProblems
from bridge_environments import registry
from tests.logged import logged
from tests.models import chat, tiny
from tests.streams import environment_stream
from tests.unit import tools_sample
from tests.unit.http_server import HttpRequest, as_json, serving
from tests.unit.openai_server import openai
from tests.unit.openai_server import openai as openai_server

FILE = Path(__file__).parents[1] / "tools_sample.py"
FORMS: dict[str, Callable[[str, Any], str]] = {
    "qwen2_5": lambda name, given: f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call><|im_end|>',
    "llama3_1": lambda name, given: f'{{"name": "{name}", "parameters": {given}}}<|eot_id|>',
    "mistral": lambda name, given: f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {given}, "id": "abcdefgh9"}}]</s>',
}
FORMS["qwen3_training"] = FORMS["qwen2_5"]
FORMS["qwen3"] = lambda name, given: f"<think>\nI call {name}.\n</think>\n\n{FORMS['qwen2_5'](name, given)}"
ANSWERED = ("<tool_response>", "ipython<|end_header_id|>", "[TOOL_RESULTS]")
Say = Callable[[int, int], str]
"""The number of the problem and of the turn -> what the model says."""


@dataclass
class Rolled:
    stream: EnvironmentStream
    requests: list[HttpRequest]
    tokenizer: PreTrainedTokenizerBase
    answers: list[tuple[list[int], list[int]]]
    """The prompt and the tokens of each answer."""
    notes: list[str]


def scattered(tokenizer: PreTrainedTokenizerBase, text: str, chance: random.Random) -> list[int]:
    """Return tokens of a text that no tokenizer would choose: most words are split at random."""
    ids: list[int] = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        piece = tokenizer.decode([token])
        cut = chance.randrange(1, len(piece)) if len(piece) > 1 and token not in tokenizer.added_tokens_decoder else 0
        parts = [piece[:cut], piece[cut:]] if cut and chance.random() < 0.8 else []
        ids += [id_ for part in parts for id_ in tokenizer(part, add_special_tokens=False)["input_ids"]] or [token]
    return ids


@contextmanager
def rolled(folder: Path, say: Say, name: str = "qwen2_5", kind: str = "Bench", **choices: Any) -> Iterator[Rolled]:
    def words(prompt: str) -> str:
        begun, _, behind = prompt.rpartition("Begin at ")[2].partition(": ")
        return say(int(begun), sum(map(behind.count, ANSWERED)))

    with spoken(folder, words, name, **({"environment": f"{FILE}:{kind}"} | choices)) as ours:
        yield ours


@contextmanager
def spoken(
    folder: Path,
    words: Callable[[str], str],
    name: str = "qwen2_5",
    *,
    max_model_len: int | None = None,
    ranks: Ranks = ALONE,
    reports_experts: bool = False,
    **choices: Any,
) -> Iterator[Rolled]:
    """Yield a stream whose server answers each prompt with `words`, split into tokens as no tokenizer would."""
    tiny.qwen2(600).save_pretrained(folder)
    tokenizer = chat.tokenizer(folder, name)
    fixed: dict[str, Any] = {"model_name": str(folder), "batch_size": 8, "group_size": 4, "max_new_tokens": 600}
    fixed |= {"max_retries": 0, "max_unscored_share": 1.0, "reward_processes": 0}
    config = TrainConfig.of(**(fixed | choices))
    environment = registry.load(config.task)
    answers: list[tuple[list[int], list[int]]] = []

    def bend(document: dict[str, Any], request: HttpRequest) -> Any:
        prompt = request.body["prompt"]
        text = words(tokenizer.decode(prompt))
        ids = scattered(tokenizer, text, random.Random(request.body["seed"]))[: request.body["max_tokens"]]
        texts = request.body.get("stop", [])
        cuts = [n for n in range(len(ids)) if any(stop in tokenizer.decode(ids[: n + 1]) for stop in texts)]
        ids = ids[: cuts[0] + 1] if cuts else ids
        answers.append((prompt, ids))
        is_whole = bool(cuts) or ids[-1:] == [tokenizer.eos_token_id]
        (one,) = document["choices"]
        one |= {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5 - 0.001 * index for index in range(len(ids))]},
            "text": tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": "stop" if is_whole else "length",
        }
        if "top_p" in request.body:
            one["kept"] = [(0.001 * index, index + 1) for index in range(len(ids))]
        if "experts" in request.body:  # the number of tokens in the prompt, which grows from turn to turn
            rows = np.full(len(prompt) + len(ids) - 1 - request.body["experts"], len(prompt), "<i2")
            one["experts"] = {"kind": "int16", "content": base64.b64encode(rows.tobytes()).decode()}
        return document

    stream = environment_stream(config, environment, ranks=ranks)
    with (
        serving(openai(bend, is_bridge=True, max_model_len=max_model_len)) as server,
        logged() as notes,
        closing(stream),
    ):
        stream.served(Endpoint(url=server.url, reports_experts=reports_experts), 3)
        yield Rolled(stream, server.requests, tokenizer, answers, notes)


def calls(form: str, *names: str, text: str = "abc") -> Say:
    """Call a tool in each turn, `misbehave` with the chosen failure, then finish."""

    def say(_: int, turn: int) -> str:
        if turn == len(names):
            return f"It is done, at last.{chat.ENDS[form[:5].rstrip('23_')]}"
        name, how = names[turn].partition(" ")[::2]
        return FORMS[form](name, json.dumps({"how": how} if how else {"text": f"{text}#{turn}"}))

    return say


def sequences(group: Group) -> list[list[int]]:
    return [[*group.prompt_token_ids, *completion.token_ids] for completion in group.completions]


@pytest.mark.parametrize("name", FORMS)
def test_every_token_was_sampled_or_read_by_the_server(tmp_path: Path, name: str) -> None:
    """20,000 tokens for each template, split where no tokenizer would split."""
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}} if name == "qwen3_training" else {}
    say = calls(name, "add", "add", "add", text="The answer is 19, I think, user assistant. " * 5)
    with rolled(tmp_path, say, name, max_new_tokens=4000, batch_size=32, **off) as ours:
        groups = [group for step in (1, 2) for group in ours.stream.take(8, step=step)]
        tokenizer = ours.tokenizer
    read = {(*prompt, *ids) for prompt, ids in ours.answers}
    num_tokens = num_other = 0
    for group in groups:
        for sequence, one in zip(sequences(group), group.completions, strict=True):
            assert tuple(sequence) in read
            num_tokens += len(sequence)
            turns = [answer for answer in ours.answers if sequence[: sum(map(len, answer))] == [*answer[0], *answer[1]]]
            assert len(turns) == one.num_turns == 4
            expected = [False] * len(sequence)
            for prompt, ids in turns:
                expected[len(prompt) : len(prompt) + len(ids)] = [True] * len(ids)
                assert sequence[: len(prompt)] == prompt
                num_other += tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] != ids
            assert one.sampled == tuple(expected[len(group.prompt_token_ids) :])
            assert [math.isnan(value) for value in one.logprobs] == [not own for own in one.sampled or ()]
            assert list(one.versions) == [3 if own else None for own in one.sampled or ()]
    assert num_tokens > 20_000
    assert num_other > 150, "re-encoding would have changed most turns"


def test_trajectory_is_scored_by_its_own_instance(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add", "add")) as ours:
        groups = ours.stream.take(2, step=1)
    for group in groups:
        start = group.problem["start"]  # type: ignore[typeddict-item]
        assert group.rewards == pytest.approx((start + 10 + 0.020,) * 4)
        assert group.completions[0].finish_reason == "stop"
        assert group.completions[0].text.splitlines() == [
            "assistant: <tool_call>", '{"name": "add", "arguments": {"text": "abc#0"}}', "</tool_call>",
            f"add: {start + 5}",
            "assistant: <tool_call>", '{"name": "add", "arguments": {"text": "abc#1"}}', "</tool_call>",
            f"add: {start + 10}",
            "assistant: It is done, at last.",
        ]  # fmt: skip
        prompt = ours.tokenizer.decode(group.prompt_token_ids)
        assert f"Begin at {start}: {'' if start == 5 else 'go on.<|im_end|>'}" in prompt
        assert '"name": "add", "description": "Add the length of a text, and return the total."' in prompt
        assert '"misbehave"' in prompt
        assert "get_reward" not in prompt
        assert "reset" not in prompt


def test_evaluations_and_records_contain_full_trajectories(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add"), eval_samples=2) as ours:
        first, second = (ours.stream.evaluate(step=step) for step in (0, 4))
        groups = ours.stream.take(2, step=1)
    assert repr(first) == repr(second)  # NaN is not equal to itself
    (group,) = first or []
    assert group.rewards == pytest.approx((50 + 5 + 0.020,) * 2)
    evaluation = measuring.evaluation([group], step=0, version=3, seconds=1)
    assert (evaluation.turns_mean, evaluation.tool_errors, evaluation.reward_mean) == pytest.approx((2, 0, 55.02))
    assert evaluation.completion_tokens_mean == group.completions[0].num_sampled < len(group.completions[0].token_ids)
    run = RunDirectory.create(tmp_path / "run", environment="bench")
    run.append_rollouts(1, groups)
    for line, own in zip(run.rollouts.read_text().splitlines(), groups, strict=True):
        for written, one in zip(json.loads(line)["completions"], own.completions, strict=True):
            first, answer, last = written["turns"]
            assert (written["text"], written["weight_version"]) == (last["text"], 3)
            (call,) = first["tool_calls"]
            assert (first["role"], call["name"], call["arguments"]) == ("assistant", "add", {"text": "abc#0"})
            assert (answer["role"], answer["name"], answer["id"]) == ("tool", "add", call["id"])
            assert first["tokens"] + last["tokens"] == one.num_sampled
            assert one.text == f"assistant: {first['text']}\nadd: {answer['text']}\nassistant: {last['text']}"


def test_each_turn_has_its_own_seed_and_the_remaining_tokens(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add", "add"), max_turns=5) as ours:
        ours.stream.take(2, step=1)
        ours.stream.take(2, step=2)
    bodies = [request.body for request in ours.requests if request.method == "POST"]
    assert all(body["n"] == 1 for body in bodies)
    seeds = [body["seed"] for body in bodies]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 4 * 3
    assert {seed % CALL_SEEDS for seed in seeds} == {5 * index + turn for index in range(8) for turn in range(3)}
    lengths = {body["max_tokens"] for body in bodies}
    assert max(lengths) == 600
    assert min(lengths) < 500


def test_limits_on_turns_and_tokens_truncate_a_trajectory(tmp_path: Path) -> None:
    say = calls("qwen2_5", *["add"] * 50)
    with rolled(tmp_path, say, max_turns=3) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert {completion.num_turns for completion in group.completions} == {3}
    assert {completion.finish_reason for completion in group.completions} == {"length"}
    assert all(completion.sampled and completion.sampled[-1] for completion in group.completions), (
        "no answer that nobody reads"
    )
    with rolled(tmp_path, say, max_turns=50, max_new_tokens=300) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    assert all(200 < len(completion.token_ids) <= 300 for completion in group.completions)
    assert {completion.finish_reason for completion in group.completions} == {"length"}
    assert len(group.rewards) == 4


def test_only_sampled_tokens_are_trained_on(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add")) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    uneven = Group(**{**vars(group), "rewards": (0.0, 1.0, 0.0, 1.0)})
    made = samples.samples(
        [uneven],
        LossSpec(aggregation="token_mean", advantage_scale="group", clip_low=0.2, clip_high=0.2),
        max_new_tokens=600,
    )
    assert len(made) == 4
    for sample, one in zip(made, group.completions, strict=True):
        assert len(sample.sampled_logprobs) == one.num_sampled == sum(sample.sampled or ())
        assert not any(math.isnan(value) for value in sample.sampled_logprobs)


def test_kept_thresholds_stay_with_their_tokens(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add"), top_p=0.9) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    for one in group.completions:
        assert sum(one.sampled or ()) < len(one.token_ids) == len(one.kept)
        ours_only = zip(one.logprobs, one.kept, one.sampled or (), strict=True)
        sampled = [(logprob, threshold) for logprob, (threshold, _), own in ours_only if own]
        assert all(threshold == pytest.approx(-0.5 - logprob) for logprob, threshold in sampled), "of the same token"


def check_experts(ours: Rolled, sequence: Completion, num_prompt: int) -> list[int]:
    """Check that each token's experts were reported once; return the prompt length of the turn that reported them."""
    rows: list[int] = np.frombuffer(sequence.experts, "<i2").tolist()
    assert len(rows) == num_prompt + len(sequence.token_ids) - 1
    assert rows == sorted(rows), "the last token of a turn has its experts in the next one"
    known = [[*prompt, *ids] for prompt, ids in ours.answers]
    for body in (request.body for request in ours.requests if request.body):
        lengths = [len(tokens) - 1 for tokens in known if body["prompt"][: len(tokens)] == tokens]
        assert body["experts"] == max(lengths, default=0)
    return rows


def test_tokens_keep_the_experts_first_reported_for_them(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add"), reports_experts=True) as ours:
        (group, *_) = ours.stream.take(2, step=1)
    for one in group.completions:
        rows = check_experts(ours, one, len(group.prompt_token_ids))
        first_turn = (one.sampled or ()).index(False)
        assert rows.count(rows[0]) == rows[0] + first_turn - 1
        assert len(set(rows)) == one.num_turns == 2


def test_reset_observations_may_differ_and_are_context(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add"), batch_size=24) as ours:
        groups = ours.stream.take(6, step=1)
    (group,) = [group for group in groups if group.problem["start"] == 5]  # type: ignore[typeddict-item]
    read = {(*prompt, *ids) for prompt, ids in ours.answers}
    assert all(tuple(sequence) in read for sequence in sequences(group))
    assert all(not (completion.sampled or ())[0] for completion in group.completions)
    assert {completion.num_turns for completion in group.completions} == {2}


def test_trls_get_reward_and_async_tools_work(tmp_path: Path) -> None:
    with rolled(tmp_path, calls("qwen2_5", "add", "slow"), kind="Rewarded") as ours:
        (group, *_) = ours.stream.take(2, step=1)
    start = group.problem["start"]  # type: ignore[typeddict-item]
    assert group.rewards == (-1.0 * (start + 5),) * 4
    assert "\nslow: abc#1\n" in group.completions[0].text


def test_environment_class_may_reward_each_turn(tmp_path: Path) -> None:
    def say(number: int, turn: int) -> str:
        return calls("qwen2_5", *["add"] * (2 if number else 1), text="a" * (number + 1))(number, turn)

    with rolled(tmp_path, say, kind="PerTurn", batch_size=24, overlong_buffer=10, max_new_tokens=200) as ours:
        groups = ours.stream.take(6, step=1)
    for group in groups:
        start = group.problem["start"]  # type: ignore[typeddict-item]
        expected = (start + 3.0,) * (2 if start else 1)
        assert group.turn_rewards == ((*expected, 1.0),) * 4
        assert group.rewards == (sum(expected) + 1,) * 4
    run = RunDirectory.create(tmp_path / "run", environment="bench")
    run.append_rollouts(1, groups[:1])
    (line,) = run.rollouts.read_text().splitlines()
    written, rewards = json.loads(line)["completions"][0], list(groups[0].turn_rewards[0])
    assert written["turn_rewards"] == rewards
    assert [turn["reward"] for turn in written["turns"] if "tokens" in turn] == rewards


def test_wrong_number_of_turn_rewards_fails_the_trajectory(tmp_path: Path) -> None:
    def say(number: int, turn: int) -> str:
        return calls("qwen2_5", "add", *["misbehave prints"] * (number == 1))(number, turn)

    with rolled(tmp_path, say, kind="PerTurn", batch_size=24) as ours:
        groups = ours.stream.take(6, step=1)
    for group in groups:
        assert len(group.rewards) == (0 if group.problem["start"] == 1 else 4)  # type: ignore[typeddict-item]
    (line,) = ours.notes
    assert "2 rewards for 3 turns, expected one for each turn of the model, on prompt" in line


def answers(completion: Completion, name: str = "misbehave") -> list[str]:
    return [line.partition(": ")[2] for line in completion.text.splitlines() if line.startswith(f"{name}: ")]


HARMLESS = {
    "raises": "error: ValueError: two lines",
    "exits": "error: SystemExit: 3",
    "prints": "printed",
    "forks": "parent",
    "lacks": "error: AttributeError: 'Bench' object has no attribute '_lacks'",
}
FATAL = {
    "hangs": "tool misbehave took longer than 4 s (tools_sample.py line ",
    "dies": "tool misbehave exited with status 7",
}


@pytest.mark.parametrize("processes", [0, 2])
def test_exception_in_a_tool_becomes_its_result(tmp_path: Path, processes: int) -> None:
    def say(number: int, turn: int) -> str:
        return calls("qwen2_5", f"misbehave {[*HARMLESS][number % len(HARMLESS)]}")(number, turn)

    with rolled(tmp_path, say, reward_processes=processes, batch_size=24) as ours:
        groups = ours.stream.take(6, step=1)
    assert ours.notes == []
    evaluation = measuring.evaluation(groups, step=0, version=3, seconds=1)
    assert (evaluation.turns_mean, evaluation.tool_errors) == (2, 4 * 4)
    for group in groups:
        how = [*HARMLESS][group.problem["start"] % len(HARMLESS)]  # type: ignore[typeddict-item]
        assert len(group.rewards) == 4
        for one in group.completions:
            assert answers(one) == [HARMLESS[how]]
            assert one.tool_errors == HARMLESS[how].startswith("error")


def test_call_that_cannot_be_read_counts_as_a_tool_error(tmp_path: Path) -> None:
    written = "<tool_call>\n{'name': 'add', 'arguments': {'text': 'abc'}}\n</tool_call><|im_end|>"
    with rolled(tmp_path, lambda *_: written) as ours:
        groups = ours.stream.take(2, step=1)
    assert {one.tool_errors for group in groups for one in group.completions} == {1}
    assert all("'name': 'add'" in one.text for group in groups for one in group.completions)
    assert [note for note in ours.notes if "in a form that cannot be read" in note] == ours.notes
    assert len(ours.notes) == 1


def test_tool_result_rejected_by_template_fails_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picky = "{% for m in messages if m.role == 'tool' and m.content == '1' %}{{ 1 // 0 }}{% endfor %}"
    template = picky + chat.template("qwen2_5")
    monkeypatch.setattr(chat, "template", lambda _: template)

    def say(number: int, turn: int) -> str:
        return (
            f"It is.{chat.ENDS['qwen']}" if turn else FORMS["qwen2_5"]("add", json.dumps({"text": "x" * (number < 1)}))
        )

    with rolled(tmp_path, say) as ours:
        groups = ours.stream.take(2, step=1)
    faults = [one.fault for group in groups for one in group.unscored]
    assert all(
        "rejects messages with the roles user, assistant, tool: ZeroDivisionError: " in fault for fault in faults
    )
    assert faults
    assert len(faults) + sum(len(group.rewards) for group in groups) == 8


def test_unknown_tool_and_megabyte_result_become_replies(tmp_path: Path) -> None:
    def say(number: int, turn: int) -> str:
        return calls("qwen2_5", "misbehave is_long" if number % 2 else "nowhere")(number, turn)

    with rolled(tmp_path, say, reward_processes=2, batch_size=24, max_new_tokens=12_000) as ours:
        groups = ours.stream.take(6, step=1)
    for group in groups:
        if group.problem["start"] % 2:  # type: ignore[typeddict-item]
            (answer,) = answers(group.completions[0])
            assert len(answer) == 10_000
            assert answer.endswith("xxx... (truncated from 1,048,576 characters)")
        else:
            assert answers(group.completions[0], "nowhere") == ["error: there is no tool nowhere, only add, misbehave"]
            assert group.completions[0].tool_errors == 1


@pytest.mark.parametrize("processes", [0, 2])
def test_lone_surrogate_becomes_replacement_character(tmp_path: Path, processes: int) -> None:
    say = calls("qwen2_5", "add", text="\ude00")  # the model writes this as \\ude00
    with rolled(tmp_path, say, kind="Halves", reward_processes=processes) as ours:
        (group, *_) = ours.stream.take(2, step=1)
        prompts = [ours.tokenizer.decode(prompt) for prompt, _ in ours.answers]
    assert {prompt.count("\ufffd") for prompt in prompts} == {1, 2}
    assert "add: \ufffd#0" in group.completions[0].text


def sleepers(folder: Path) -> list[psutil.Process]:
    """Return the sleeping processes whose environment names `folder` as STARTED_IN."""
    every = psutil.process_iter(["name", "environ"])
    sleeping = [process for process in every if process.info["name"] == "sleep"]
    return [process for process in sleeping if (process.info["environ"] or {}).get("STARTED_IN") == str(folder)]


@pytest.mark.parametrize("how", FATAL)
def test_tool_that_hangs_or_dies_fails_only_its_trajectory(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARTED_IN", str(tmp_path))

    def say(number: int, turn: int) -> str:
        return calls("qwen2_5", f"misbehave {how}" if number == 1 else "add")(number, turn)

    choices: dict[str, Any] = {"reward_processes": 3, "tool_timeout_s": 4.0, "batch_size": 24}
    with rolled(tmp_path, say, **choices) as ours:
        groups = ours.stream.take(6, step=1)
        assert not sleepers(tmp_path), "what it started has ended, too"
    for group in groups:
        if group.problem["start"] == 1:  # type: ignore[typeddict-item]
            assert not group.rewards
            assert len(group.unscored) == 4
            assert all(failure.fault.startswith(FATAL[how]) and "\n" not in failure.fault for failure in group.unscored)
            assert all("misbehave" in failure.completion.text for failure in group.unscored), "what it said is kept"
        else:
            assert len(group.rewards) == 4
    (line,) = ours.notes
    assert line.startswith(f"step 1: 4 completions without a reward left out: {FATAL[how]}")


def runs(pid: int) -> bool:
    """Return whether any thread of a process is still running."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    return False


def test_process_that_exits_between_calls_is_reported(tmp_path: Path) -> None:
    def words(prompt: str) -> str:
        pids = [*map(int, re.findall(r"process (\d+)", prompt))]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            while runs(pid):
                time.sleep(0.01)
        return calls("qwen2_5", "misbehave names_its_process", "add")(0, len(pids))

    with spoken(tmp_path, words, environment=f"{FILE}:Bench", reward_processes=4) as ours:
        (group, *_) = ours.stream.take(1, step=1)
    assert [failure.fault.partition(",")[0] for failure in group.unscored] == [
        "the environment's process ended between two calls"
    ] * 4


def test_slow_tool_does_not_delay_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool of a group that starts with the second step waits until two steps have trained on other groups."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(tools_sample.GATE, str(gate))
    slow = next(islice(endless(tools_sample.Bench(), 0), 3, None))["start"]  # type: ignore[arg-type, typeddict-item]

    def say(number: int, turn: int) -> str:
        return calls("qwen2_5", "misbehave waits" if number == slow else "add")(number, turn)

    with rolled(tmp_path, say, max_staleness=2, reward_processes=6, batch_size=8) as ours:
        assert [ours.stream.take(1, step=step)[0].number for step in (1, 2, 3)] == [0, 1, 2]
        gate.touch()
        (last,) = ours.stream.take(1, step=4)
    assert last.number == 3
    assert len(last.rewards) == 4


def test_deeply_nested_arguments_can_be_pickled_and_written(tmp_path: Path) -> None:
    deep = json.loads('{"a":' * 900 + "[1]" + "}" * 900)
    turn = as_turn("x", [Call(name="add", arguments=deep)])
    made = Completion(token_ids=(1,), logprobs=(0.0,), text="x", finish_reason="stop", transcript=(turn,))
    sent = pickle.loads(pickle.dumps(made))
    group = Group(problem={"prompt": "p"}, prompt_token_ids=(1,), completions=(sent,), rewards=(1.0,))
    run = RunDirectory(tmp_path)
    run.append_rollouts(1, [group])
    (call,) = json.loads(run.rollouts.read_text())["completions"][0]["turns"][0]["tool_calls"]
    assert json.dumps(call["arguments"]).count('{"a": ') == DEEPEST


class _Rejecting:
    """A server that rejects requests that are too long."""

    LONGEST = 2048

    def __init__(self, bend: Callable[[dict[str, Any], HttpRequest], Any]) -> None:
        self._bend = bend

    def __call__(self, document: dict[str, Any], request: HttpRequest) -> Any:
        num_tokens = len(request.body["prompt"]) + request.body["max_tokens"]
        if num_tokens > self.LONGEST:
            return as_json({"error": {"message": f"{num_tokens} tokens exceed {self.LONGEST}"}}, 400)
        return self._bend(document, request)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_invalid_reset_fails_only_its_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_resumed: bool
) -> None:
    shop = """
        class Shop:
            def __iter__(self):
                for number in range(6):
                    yield {"prompt": f"Begin at {number}: ", "number": number}
            def reset(self, prompt, number):
                return "x " * 4000 if number == 3 else "go."
            def add(self, text: str) -> str:
                \"\"\"Add.

                Args:
                    text: What.
                \"\"\"
                return "y"
            def score(self, problem, completion):
                return 1.0
    """
    (tmp_path / "shop.py").write_text(textwrap.dedent(shop))
    monkeypatch.setitem(globals(), "openai", lambda bend, **choices: openai_server(_Rejecting(bend), **choices))
    choices: dict[str, Any] = {"environment": f"{tmp_path}/shop.py:Shop", "batch_size": 4, "max_unscored_share": 0.2}
    with spoken(tmp_path / "m", lambda _: "done<|im_end|>", **choices) as ours:
        if is_resumed:
            ours.stream.resume(TrainedProblems(below=2))
        groups = [ours.stream.take(1, step=step)[0] for step in range(1, 7)]
    sizes = {group.problem["number"]: len(group.completions) for group in groups}  # type: ignore[typeddict-item]
    assert sizes[3] == 0
    assert {number for number, size in sizes.items() if size == 4} == {*sizes} - {3}
    (line,) = ours.notes
    assert "4 completions without a reward left out: the prompt cannot be used: the server at " in line
