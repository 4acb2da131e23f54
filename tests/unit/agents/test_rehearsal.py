"""A rehearsal before a run starts finds prompts that cannot be encoded, and scores that always fail."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from bridge.agents import rehearsal
from bridge.config import SamplingConfig, TaskConfig
from bridge.errors import RewardError, UnsupportedModelError, UsageError
from bridge.scoring.score import FailedScore, Scores
from bridge.types import Problem
from bridge.types import Task as BridgeTask
from bridge.weights import skeleton
from tests.logged import logged
from tests.models import chat, tiny
from tests.unit import scores_sample
from tests.unit.scores_sample import Hanging, Sample

CHAT: Any = [{"role": "user", "content": "3+4?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.write_tokenizer(folder, tiny.VOCABULARY)
    return folder


@dataclass
class Task:
    """An endless environment, scored by a function."""

    function: Callable[[str], float] = float
    prompt: Any = "3+4="
    kept: list[Problem] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Problem]:
        for _ in count():
            yield {"prompt": self.prompt, "answer": 7}

    def held_out(self) -> list[Problem]:
        return self.kept

    def score(self, problem: Problem, completion: str) -> float:
        self.scored.append(completion)
        return self.function(completion)


def tried(model: Path, task: Task, recipe: Callable[[], Scores] | None = None, **choices: Any) -> list[str]:
    """Return the logged lines."""
    config = TaskConfig.model_validate({"reward_processes": 1 if recipe else 0} | choices)
    given = replace(BridgeTask.of(task), recipe=recipe, in_workers=True) if recipe else task
    with logged() as lines:
        rehearsal.rehearse(str(model), config, SamplingConfig(), given)
    return lines


def test_messages_without_a_chat_template_are_refused(model: Path) -> None:
    held_out: list[Problem] = [{"prompt": CHAT}]
    for task in (Task(prompt=CHAT), Task(kept=held_out)):
        with pytest.raises(RewardError, match="the model's tokenizer has no chat template"):
            tried(model, task)
        assert task.scored == []


@dataclass
class Pictured(Task):
    """Problems with an image."""

    path: str = ""

    def __iter__(self) -> Iterator[Problem]:
        yield {"prompt": "<|image_pad|>?", "images": [self.path], "answer": 7}


@pytest.mark.parametrize("is_held_out", [False, True])
def test_images_late_in_a_list_are_found_before_the_run(tmp_path: Path, *, is_held_out: bool) -> None:
    text_only = tmp_path / "text_only"
    tiny.llama().save_pretrained(text_only)
    tiny.write_tokenizer(text_only, tiny.VOCABULARY)
    texts: list[Problem] = [{"prompt": "3+4=", "answer": 7}] * 1000
    rows: list[Problem] = [*texts, {"prompt": "<|image_pad|>?", "images": [str(tmp_path / "a.png")], "answer": 7}]
    training, held_out = (texts, rows) if is_held_out else (rows, texts)
    task = BridgeTask(problems=lambda: iter(training), kept=held_out, recipe=Task)
    with pytest.raises(UnsupportedModelError, match="has no vision model"):
        rehearsal.rehearse(str(text_only), TaskConfig(reward_processes=0), SamplingConfig(), task)


@pytest.mark.parametrize("is_held_out", [False, True])
def test_long_prompt_late_in_a_list_is_found_before_the_run(model: Path, *, is_held_out: bool) -> None:
    texts: list[Problem] = [{"prompt": "3+4=", "answer": 7}] * 1000
    long = "3+" * 25 + "4="
    rows: list[Problem] = [*texts, {"prompt": long, "answer": 79}, *texts]
    training, held_out = (texts, rows) if is_held_out else (rows, texts)
    task = BridgeTask(problems=lambda: iter(training), kept=held_out, recipe=Task)
    num_tokens = len(skeleton.tokenizer(str(model))(long)["input_ids"])

    def try_with(max_model_len: int | None, max_new_tokens: int | None = 10) -> None:
        sampling = SamplingConfig(max_new_tokens=max_new_tokens)
        config = TaskConfig(reward_processes=0)
        rehearsal.rehearse(str(model), config, sampling, task, max_model_len=max_model_len)

    for fitting in (num_tokens + 10, None):
        try_with(fitting)
    try_with(2 * num_tokens, None)  # by default, half of the sequence is left for the prompt
    with pytest.raises(RewardError) as caught:
        try_with(num_tokens + 9)
    assert caught.value.message.endswith(
        f"is too long: its {num_tokens} tokens and the 10 of --max-new-tokens exceed the server's longest sequence"
        f" of {num_tokens + 9} tokens"
    )


def test_images_for_a_text_only_model_are_refused(tmp_path: Path) -> None:
    text_only = tmp_path / "text_only"
    tiny.llama().save_pretrained(text_only)
    tiny.write_tokenizer(text_only, tiny.VOCABULARY)
    with pytest.raises(UnsupportedModelError, match="is a llama, which has no vision model"):
        tried(text_only, Pictured(path=str(tmp_path / "a.png")))


def test_argument_that_no_template_uses_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False, "thinking": 1}}
    with pytest.raises(UsageError, match="--chat-template-kwargs has no effect: the prompts are text"):
        tried(model, Task(), **choices)
    tokenizer = skeleton.tokenizer(str(model))
    monkeypatch.setattr(skeleton, "tokenizer", lambda _: tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if thinking %}={% endif %}"
    with pytest.raises(UsageError, match="the model's chat template does not use enable_thinking"):
        tried(model, Task(prompt=CHAT), **choices)
    serving, line = tried(model, Task(prompt=CHAT), chat_template_kwargs={"thinking": True})
    assert "does not end a turn with a special token" in line
    assert serving.endswith("""vllm serve FOLDER --default-chat-template-kwargs '{"thinking": true}'""")


def test_argument_of_another_named_template_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = skeleton.tokenizer(str(model))
    monkeypatch.setattr(skeleton, "tokenizer", lambda _: tokenizer)
    plain = "{{ messages[0]['content'] }}"
    tokenizer.chat_template = {"default": plain, "tool_use": "{{ tools }}{{ thinking }}" + plain}
    with pytest.raises(UsageError, match="the model's chat template does not use thinking"):
        tried(model, Task(prompt=CHAT), chat_template_kwargs={"thinking": True})


def test_template_that_opens_no_turn_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = skeleton.tokenizer(str(model))
    monkeypatch.setattr(skeleton, "tokenizer", lambda _: tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    (line,) = tried(model, Task(prompt=CHAT))
    assert "ignores add_generation_prompt: prompts end without 'assistant: ', with which it begins a turn" in line


@pytest.mark.parametrize(("name", "is_written"), [("qwen2_5", True), ("qwen3", False)])
def test_system_message_that_the_template_adds_is_reported(tmp_path: Path, name: str, is_written: bool) -> None:
    chat.tokenizer(tmp_path, name)
    tiny.qwen2(600).save_pretrained(tmp_path)
    assert tried(tmp_path, Task(prompt=CHAT)) == []
    lines = tried(tmp_path, Task(prompt=CHAT), system_prompt="")
    assert ["then writes one of its own: 'You are Qwen, created" in line for line in lines] == [True] * is_written


def of_list(problems: Any, held_out: Any = ()) -> BridgeTask:
    return BridgeTask(problems=lambda: iter(problems), kept=held_out, recipe=Task)


def test_dropped_message_late_in_a_list_is_located(tmp_path: Path) -> None:
    chat.tokenizer(tmp_path, "qwen2_5")
    tiny.qwen2(600).save_pretrained(tmp_path)
    rows = [{"prompt": CHAT, "answer": 7}] * 5000
    rows[4321] = {"prompt": [{"role": "human", "content": "3+4?"}], "answer": 7}
    for name, task in (("problem", of_list(rows)), ("held-out problem", of_list(rows[:9], rows))):
        with pytest.raises(RewardError) as caught:
            rehearsal.rehearse(str(tmp_path), TaskConfig(reward_processes=0), SamplingConfig(), task)
        assert caught.value.message.startswith(f"{name} 4322 of 5,000: the model's chat template drops the message")


def test_rehearsal_samples_problems_from_the_whole_list(model: Path) -> None:
    rows: Any = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(5000)]
    tried_ones, lines = rehearsal.tried(of_list(rows, rows[:20]))
    places = [int(place.split()[1]) for place, _ in tried_ones if place.startswith("problem")]
    assert places[:3] == [1, 2, 3]
    assert len(places) == len({*places}) == rehearsal.NUM_TRIED
    assert max(places) > 4900
    assert lines == ["the prompts of 256 of 5,000 problems are tested before the start"]
    assert tried_ones == rehearsal.tried(of_list(rows, rows[:20]))[0], "the same each time"
    long: Any = [{"prompt": "1+" * 50_000 + str(number), "answer": 7} for number in range(200)]
    assert 3 < len(rehearsal.tried(of_list(long))[0]) < 30, "in about a second, however long they are"


def test_prompt_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    tiny.qwen2(len(tokenizer) - 2).save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"problem 1: token \d+ of the prompt .* is beyond the model's \d+ emb"):
        tried(tmp_path, Task(prompt="<think>3+4="))
    (line,) = tried(tmp_path, Task())
    assert line.startswith("2 tokens of the tokenizer are beyond the model's")


def test_stop_string_that_never_matches_is_refused(tmp_path: Path) -> None:
    chat.tokenizer(tmp_path, "qwen2_5")
    tiny.qwen2(600).save_pretrained(tmp_path)
    sampling = SamplingConfig(stop=("<|im_end|>\n",))
    with pytest.raises(UsageError, match="never ends a completion"):
        rehearsal.rehearse(str(tmp_path), TaskConfig(reward_processes=0), sampling, Task())


def test_score_that_always_raises_is_refused_with_its_line(model: Path) -> None:
    with pytest.raises(RewardError) as caught:
        tried(model, Task(lambda _: 1 / 0))
    message = caught.value.message
    assert message.startswith("none of 15 made-up completions of the first problems got a reward: Task.score ")
    assert "raised ZeroDivisionError: division by zero (test_rehearsal.py line " in message
    assert message.endswith("on prompt '3+4=' and completion '7'")
    assert "--max-unscored-share 1" in caught.value.hint
    with pytest.raises(RewardError, match=r"Task\.score returned nan, expected a finite number"):
        tried(model, Task(lambda _: float("nan")))


def test_worker_score_is_rehearsed_in_the_worker(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tried(model, Task(), partial(Sample, log)) == []
    (line,) = log.read_text().splitlines()
    assert line.endswith(" 7"), "one completion is enough"
    with pytest.raises(RewardError, match="creating the scoring object raised ValueError: no luck"):
        tried(model, Task(), scores_sample.broken)


def test_score_that_lacks_an_api_key_names_the_flag(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "abc")
    with pytest.raises(RewardError, match="PermissionError: 401") as met:
        tried(model, Task(), scores_sample.Judge)
    assert "it cannot read " in met.value.hint
    assert "JUDGE_KEY" in met.value.hint
    with pytest.raises(RewardError, match="KeyError: 'JUDGE_KEY'") as met:
        tried(model, Task(), scores_sample.keyed)
    assert met.value.hint.endswith("--worker-env JUDGE_KEY")
    assert tried(model, Task(), scores_sample.Judge, worker_env="JUDGE_KEY") == []


@pytest.mark.parametrize(
    "function",
    [
        float,
        lambda text: float(re.findall(r"<answer>(.*)</answer>", text)[0]),
        lambda text: float(re.findall(r"boxed{(.*)}", text)[0]),
        lambda text: float(json.loads(text)["answer"]),
        lambda text: [1.0][len(text)],
    ],
)
def test_score_that_accepts_a_single_format_passes(model: Path, function: Callable[[str], float]) -> None:
    task = Task(function)
    assert tried(model, task) == []
    assert 1 <= len(task.scored) <= 5


def test_mixed_or_allowed_failures_are_only_logged(model: Path) -> None:
    def differs(text: str) -> float:
        return {"7": 1 / int(not text) if text else 0.0}["8"]

    for notes in (tried(model, Task(differs)), tried(model, Task(lambda _: 1 / 0), max_unscored_share=1)):
        assert len(notes) == 1
        assert "got a reward: Task.score raised " in notes[0]


def test_slow_score_is_left_to_the_training_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "LIMIT_S", 1.0)
    notes = tried(model, Task(), partial(Hanging, tmp_path / "log"), reward_timeout_s=1000)
    assert notes == ["no made-up completion of the first problems got a reward within 1 s"]


def test_rehearsal_out_of_time_reports_its_first_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow:
        def __init__(self) -> None:
            self.failures = [FailedScore(kind="slow", line="Task.score took longer than 3 s")]

        async def rehearse(self, *_: object) -> FailedScore:
            if not self.failures:
                await asyncio.sleep(1000)
            return self.failures.pop()

        async def close(self) -> None:
            pass

    monkeypatch.setattr(rehearsal, "LIMIT_S", 0.05)
    assert asyncio.run(rehearsal._failures(cast(Any, Slow()), [{"prompt": "1"}])) == []
    assert caplog.messages == [
        "no made-up completion of the first problems got a reward within 0.05 s: Task.score took longer than 3 s"
    ]


@pytest.mark.parametrize(
    "answer", [10**5000, type("Odd", (), {"__str__": lambda self: 1 / 0})()], ids=["very long integer", "str fails"]
)
def test_unprintable_answer_is_left_out_of_the_rehearsal(answer: object) -> None:
    assert len(list(rehearsal.completions({"prompt": "p", "answer": answer}))) == 5
