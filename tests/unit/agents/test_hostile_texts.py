"""No text from a model, an agent or a reward ends a run: ten thousand texts, through every function that takes them.

Not covered: code that harms its process (`test_agent_runs.py`, `test_trajectories.py`,
`tests/unit/scoring/test_processes.py`).
"""

import asyncio
import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

from bridge.agents.agent_runs import Run, conversations, scored
from bridge.agents.conversation import Conversation
from bridge.agents.recorder import Recorder
from bridge.agents.recording import Recording
from bridge.agents.tool_calls import FORMATS, parsed
from bridge.agents.tools import Agent, Tools
from bridge.checkpoints.run_directory import RunDirectory
from bridge.engine import measuring
from bridge.errors import UsageError
from bridge.learn.samples import with_advantages
from bridge.run import reporting
from bridge.scoring.inside_worker import read, written
from bridge.scoring.score import FailedScore, Host, Reply, Score
from bridge.scoring.scorer import Scorer, Trajectory
from bridge.types import Completion, Group, Problem, Unscored
from bridge_cli import console
from bridge_cli import report as command
from tests.cli import report_runs
from tests.models import chat, tiny
from tests.unit.agents import hostile_texts
from tests.unit.agents.hostile_texts import PROBLEM, Judge, Parts

NUM_TEXTS = 10_000
HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What no file of a run may hold: `cat` would send it to the terminal."""
DIVIDES = """{% for message in messages %}{{ message.role }}
{% if 1 // ((message.content or '')|length) %}{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""
"""A template that raises no error of Jinja's for a message without text."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(hostile_texts.texts(NUM_TEXTS))


class Defects:
    """The exceptions that escaped, by location and kind."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.first: dict[tuple[str, str], str] = {}

    @contextmanager
    def of(self, where: str, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            kind = where, type(error).__name__
            self.counts[kind] += 1
            self.first.setdefault(kind, f"{ascii(text)[:80]}: {ascii(str(error))[:200]}")

    def check(self) -> None:
        assert not self.counts, "\n".join(f"{self.counts[kind]} x {kind}: {self.first[kind]}" for kind in self.counts)


def test_hostile_reward_gives_a_score_or_a_failure(texts: list[str]) -> None:
    defects, judge, parts = Defects(), Judge(), Parts()
    tools, agent = Tools(Judge), Agent(Judge)
    for text in texts:
        problem: Problem = {"prompt": text, "answer": text}
        acts: dict[str, Callable[[], Any]] = {
            "score": partial(Host(judge).score, PROBLEM, text),
            "scores": partial(Host(parts).score, PROBLEM, text),
            "agent": partial(agent.run, problem, ""),
            "reset": partial(tools.begin, problem),
            "tool": partial(tools.call, "act", {"text": text}),
            "no tool": partial(tools.call, text, {}),
        }
        for name, act in acts.items():
            with defects.of(name, text):
                outcome = act()
                assert isinstance(outcome, Score | FailedScore | Reply)
                if isinstance(outcome, FailedScore):
                    assert not HOSTILE.search(outcome.line + outcome.kind), "control characters"
                    assert len(outcome.line) < 1_000
                if isinstance(outcome, Score):
                    assert abs(outcome.reward) <= 1e30
                    assert not HOSTILE.search("".join(outcome.parts)), "control characters"
                frame = written(1, outcome)
                if len(frame) < 2**20:
                    assert read(frame)[0] == 1
    defects.check()


def test_hostile_scores_are_finite_numbers(texts: list[str]) -> None:
    defects, rewards = Defects(), [float(10**power) for power in (0, 30, 200, 308)]
    groups = []
    for own in (rewards, [-reward for reward in rewards], [rewards[3], -rewards[3]], rewards[3:] * 3, rewards[2:3]):
        judge: Any = SimpleNamespace(score=lambda _, text: float(text))
        scores = [Host(judge).score(PROBLEM, str(reward)) for reward in own]
        accepted = [score.reward for score in scores if isinstance(score, Score)]
        groups.append(grouped([str(reward) for reward in accepted], accepted, []))
    for scale in ("group", "batch", "none", "leave_one_out"):
        with defects.of("advantages", scale):
            filled = with_advantages(groups, scale)
            assert all(
                math.isfinite(value) for group in filled for values in group.advantages or () for value in values
            )
            assert any(value for values in filled[0].advantages or () for value in values), "a group without a signal"
    with defects.of("metrics", "evaluation"):
        assert math.isfinite(measuring.evaluation(groups, step=0, version=1, seconds=1).reward_std)
    defects.check()


def grouped(texts: list[str], rewards: list[float], faults: list[str]) -> Group:
    made = [Completion(token_ids=(7,), logprobs=(-0.5,), text=text, finish_reason="stop") for text in texts + faults]
    unscored = zip(made[len(texts) :], faults, strict=True)
    return Group(
        problem={"prompt": [{"role": text, "content": text} for text in (texts + faults)[:1]], "answer": faults},
        prompt_token_ids=(1,),
        completions=tuple(made[: len(texts)]),
        rewards=tuple(rewards),
        unscored=tuple(Unscored(completion=completion, fault=fault) for completion, fault in unscored),
    )


def test_hostile_text_is_logged_without_control_characters(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("bridge"), "propagate", False)  # pytest-xdist cannot send lone surrogates
    defects, run = Defects(), RunDirectory(report_runs.make(tmp_path / "run", num_steps=4).path)
    terminal = (tmp_path / "terminal").open("w", encoding="utf-8")
    monkeypatch.setattr(console, "people", Console(file=terminal, soft_wrap=True, force_terminal=True, width=80))
    writer = reporting.TensorBoard(run, {}, 1)
    metrics = report_runs.metrics(5, 5)
    with run.recording():
        for number, text in enumerate(texts):
            with defects.of("event", text):
                logging.getLogger("bridge").info(text)
                if number % 10 == 0:
                    console.note(text[:1000])
            group = grouped([text], [1.0], [text])
            with defects.of("rollouts", text):
                run.append_rollouts(5 + number // 100, [group])
            if number % 20 == 0:
                with defects.of("sample", text):
                    writer.log(number, metrics.curves(), reporting._sample_text([group]))
            if number % 2000 == 0:  # its depth matters, not its text
                with defects.of("deep answer", text):
                    deep: Any = text
                    for _ in range(number % 3 * 2_000):
                        deep = [deep]
                    run.append_rollouts(5, [Group(**{**vars(group), "problem": {"prompt": text[:9], "answer": deep}})])
    with closing(terminal), defects.of("report", ""):
        writer.close(failed=False)
        command.write([run.path], run.report)
    for file in [path for path in run.path.iterdir() if path.is_file()] + [tmp_path / "terminal"]:
        with defects.of(f"characters of {file.name}", ""):
            content = file.read_bytes().decode()
            assert [content[odd.start() - 40 : odd.end() + 10] for odd in HOSTILE.finditer(content)][:3] == []
    events = run.events.read_text().splitlines()
    with defects.of("events", ""):
        assert sum(bool(re.match(r"\d{4}-\d\d-\d\dT", line)) for line in events) == len(events), "a forged line"
    defects.check()


class Posting(Trajectory):
    """Sends requests with hostile texts, each answered with a hostile text, and then an ordinary request."""

    def __init__(self, texts: list[str], defects: Defects) -> None:
        self._texts, self._defects, self._draw = texts, defects, random.Random(1)

    async def run(self, base_url: str) -> Score:
        async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as client:
            for text in self._texts:
                body = hostile_texts.request(self._draw, text)
                with self._defects.of("request", text):
                    answer = await client.post(self._draw.choice(["chat/completions", "responses"]), content=body)
                    assert answer.status_code in (200, 400), answer.status_code
        return Score(reward=1.0)


@pytest.mark.parametrize("name", ["qwen2_5", "mistral", "dividing"])
def test_hostile_requests_do_not_end_the_run(texts: list[str], tmp_path: Path, name: str) -> None:
    tiny.qwen2(600).save_pretrained(tmp_path)
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5" if name == "dividing" else name)
    if name == "dividing":
        tokenizer.chat_template = DIVIDES
    defects, known = Defects(), conversations(tokenizer, str(tmp_path))
    short = [text for text in texts if len(text) < 20_000][{"qwen2_5": 0, "mistral": 1, "dividing": 2}[name] :: 20]

    async def one(recorder: Recorder, texts: list[str]) -> None:
        replies = iter([*texts, "I see."])

        async def sample(*_: Any) -> Completion:
            text = next(replies).encode(errors="replace").decode()
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            reason: Any = ("stop", "length")[len(text) % 5 == 0]
            return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), text=text, finish_reason=reason)

        async def room(_: Any) -> int:
            return 10_000

        run = Run(Recording(known), sample, room, max_turns=10_000)
        with defects.of("run", texts[0]):
            await scored(run, recorder, Posting(texts, defects), PROBLEM)
            json.dumps([written.completion(0).text for written in run.written()]).encode()

    async def all_runs() -> None:
        recorder = Recorder("m")
        try:
            await asyncio.gather(*(one(recorder, short[start::10]) for start in range(10)))
        finally:
            await recorder.close()

    asyncio.run(all_runs())
    defects.check()


@pytest.mark.parametrize("name", ["qwen2_5", "mistral", "llama3_1"])
def test_hostile_model_or_tool_text_fails_only_its_turn(texts: list[str], tmp_path: Path, name: str) -> None:
    tiny.qwen2(600).save_pretrained(tmp_path)
    tokenizer, defects = chat.tokenizer(tmp_path, name), Defects()
    schema = {"type": "function", "function": {"name": "act", "description": "d", "parameters": {"type": "object"}}}
    conversation = Conversation(tokenizer, str(tmp_path), tools=[schema])
    for text in texts:
        for form in FORMATS:
            with defects.of(f"calls of {form}", text):
                parsed(text[:100_000], form)
    for text in texts[{"qwen2_5": 10, "mistral": 11, "llama3_1": 12}[name] :: 30]:
        valid = text.encode(errors="replace").decode()
        with defects.of("turn", text):
            _, calls = conversation.read(tokenizer(valid, add_special_tokens=False)["input_ids"])
            with suppress(UsageError):  # costs the trajectory
                conversation.tokens_between(calls, [call.answered(text) for call in calls], 5)
    defects.check()


def test_hostile_scores_return_from_a_worker(texts: list[str]) -> None:
    defects = Defects()

    async def every(scorer: Scorer) -> None:
        for text in texts[10::40]:
            problem: Problem = {"prompt": text, "answer": text}
            with defects.of("worker", text):
                for outcome in await scorer.score(problem, [text]):
                    assert isinstance(outcome, Score | FailedScore)
                    if isinstance(outcome, FailedScore):
                        assert not HOSTILE.search(outcome.line + outcome.kind)

    with closing(Scorer(Judge, processes=1, timeout_s=60)) as scorer:
        asyncio.run(every(scorer))

    async def call(scorer: Scorer) -> None:
        nested: Any = 1
        for _ in range(900):
            nested = [nested]
        async with scorer.trajectory(PROBLEM) as tools:
            with defects.of("arguments of a tool", "nested"):
                await tools.begin()
                assert isinstance(await tools.call("act", {"text": nested}), Reply | FailedScore)

    with closing(Scorer(partial(Tools, Judge), processes=1, timeout_s=60)) as scorer:
        asyncio.run(call(scorer))
    defects.check()
