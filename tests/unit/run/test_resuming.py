"""What a resumed run may change: different problems or a different order are refused, other changes are reported."""

import json
import random
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress, SavedCheckpoint
from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.run import resuming
from bridge.types import Environment, Problem, Task
from bridge_cli.main import answer
from tests.unit.trainer_runs import Letters, Running, runner

NAMES = [f"a{number}" for number in range(8)]


def task(problems: Sequence[Any], *, listed: bool = True) -> Task:
    def read() -> Iterator[Problem]:
        return iter(problems) if listed else (problem for problem in problems)

    return Task(problems=read, recipe=lambda: None)


def named(names: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": name, **more} for name in names]


def config(**choices: Any) -> TrainConfig:
    return TrainConfig.of(**{"model_name": "m", "environment": "jsonl", "data": "a.jsonl", **choices})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


def saved(run_dir: Path, problems: Environment, **choices: Any) -> SavedCheckpoint:
    """Return a checkpoint at step 4 of a run with these choices."""
    chosen = config(**choices)
    (run_dir / "config.json").write_text(json.dumps(chosen.document(chosen.settled())))
    progress = Progress(
        step=4, weight_version=4, problems_drawn=4, run_dir=run_dir,
        seed=chosen.seed, problems=resuming.digest(problems),
    )  # fmt: skip
    folder = checkpoint.save(run_dir / "checkpoints" / "step_4", lambda path: (path / "x").touch(), progress)
    return checkpoint.read(folder)


def test_unchanged_run_resumes_without_a_log_line(run_dir: Path) -> None:
    source = saved(run_dir, task(named(NAMES)), lr=1e-4)
    later = config(lr=1e-4, training_steps=99, resume=True, run_dir=run_dir, save_path=run_dir)
    assert resuming.check(source, later, task(named(NAMES))) == []


def test_changes_on_resume_are_one_line(run_dir: Path) -> None:
    source = saved(run_dir, task(named(NAMES)), lr=1e-4, loss="dapo", batch_size=64)
    lines = resuming.check(source, config(loss="grpo", batch_size=16, group_size=2), task(named(NAMES)))
    assert lines == [
        "changed since step 4: group_size 8 -> 2, batch_size 64 -> 16, loss dapo -> grpo, lr 0.0001 -> default"
    ]


def test_changes_of_a_copied_run_are_relative_to_the_copy(run_dir: Path) -> None:
    original = run_dir / "original"
    original.mkdir()
    source = saved(original, task(named(NAMES)), lr=1e-4)
    shutil.copytree(original, run_dir / "copy")
    saved(original, task(named(NAMES)), lr=2e-4)  # the original run continued with another learning rate
    copied = checkpoint.read(run_dir / "copy" / "checkpoints" / source.folder.name)
    lines = resuming.check(copied, config(lr=3e-4), task(named(NAMES)))
    assert lines == ["changed since step 4: lr 0.0001 -> 0.0003"]


@pytest.mark.parametrize(("schedule", "is_reported"), [("cosine", True), ("linear", True), ("constant", False)])
def test_schedule_of_a_different_length_is_reported(run_dir: Path, schedule: str, is_reported: bool) -> None:
    source = saved(run_dir, task(named(NAMES)), training_steps=8, lr_scheduler_type=schedule)
    later = config(training_steps=16, lr_scheduler_type=schedule)
    line = (
        f"training_steps 8 -> 16: from here on the learning rate is that of a {schedule} schedule over 16 steps"
        " (at step 5 0.75 of --lr instead of 0.5)"
    )
    lines = resuming.check(source, later, task(named(NAMES)))
    assert len(lines) == is_reported
    if schedule == "linear":
        assert lines == [line]


@pytest.mark.parametrize(
    "others", [named([*NAMES, "a8"]), named(NAMES[:-1]), named(NAMES[::-1]), named([f"b{n}" for n in range(8)])]
)
def test_different_problems_are_refused(run_dir: Path, others: list[Any]) -> None:
    source = saved(run_dir, task(named(NAMES)))
    with pytest.raises(UsageError, match=r"these are not the problems that .*step_4 was trained on") as refused:
        resuming.check(source, config(), task(others))
    assert refused.value.hint.startswith("give the same --data, or start a new run from its weights: --model ")


def test_different_seed_is_refused(run_dir: Path) -> None:
    source = saved(run_dir, task(named(NAMES)), seed=3)
    with pytest.raises(UsageError, match=r"--seed 0: .* was trained on 4 problems in the order of --seed 3") as refused:
        resuming.check(source, config(), task(named(NAMES)))
    assert refused.value.hint.startswith("--seed 3, or start a new run from its weights: --model ")
    assert resuming.check(source, config(seed=5), None) == ["changed since step 4: seed 3 -> 5"]  # no problems


def test_hint_for_an_adapter_is_a_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(run_dir, task(named(NAMES)), mode="lora_only")
    with pytest.raises(UsageError) as refused:
        resuming.check(source, config(mode="lora_only"), task(named(NAMES[::-1])))
    (hinted,) = re.findall(r"(bridge export .*), then --model FOLDER", refused.value.hint)
    _, *arguments = shlex.split(hinted)
    answer(arguments)
    assert "holds neither a model nor an adapter" in capsys.readouterr().err  # it was parsed, and read the checkpoint


def test_problems_in_a_moved_file_are_recognized_by_prompt(run_dir: Path) -> None:
    source = saved(run_dir, task(named(NAMES, answer="1")), data="a.jsonl")
    lines = resuming.check(source, config(data="moved/a.parquet"), task(named(NAMES, answer="2", level=1)))
    assert lines == ["changed since step 4: data a.jsonl -> moved/a.parquet"]
    user = {"role": "user", "content": "hi"}
    before, now = ([{"prompt": [{"role": "system", "content": text}, user]}] for text in ("Be brief.", "Think."))
    assert resuming.digest(task(before)) == resuming.digest(task(now))


def test_environment_without_a_fixed_order_is_reported(run_dir: Path) -> None:
    before, now = (task(named(random.Random(seed).sample(NAMES, 8)), listed=False) for seed in range(2))
    source = saved(run_dir, before, environment="mine.py:Task", data=None)
    (line,) = resuming.check(source, config(environment="mine.py:Task", data=None), now)
    assert line.startswith("the environment's first problems differ from those of the run, but 4 of them are skipped")
    with pytest.raises(UsageError, match="these are not the problems"):
        resuming.check(source, config(environment="other.py:Task", data=None), now)


def test_run_without_recorded_problems_resumes(run_dir: Path) -> None:
    source = saved(run_dir, task(named(NAMES)))
    old = source.progress.model_copy(update={"problems": None, "seed": None})
    later = SavedCheckpoint(source.folder, old)
    assert resuming.check(later, config(), task(named(["b"]))) == []
    with pytest.raises(UsageError, match="in the order of --seed 0"):
        resuming.check(later, config(seed=1), task(named(["b"])))
    (run_dir / "config.json").write_text('{"derived": 7')
    assert resuming.check(later, config(seed=1), task(named(["b"]))) == []


def test_long_list_is_compared_by_length_and_samples() -> None:
    many = named([f"p{number}" for number in range(3 * resuming.MOST_COMPARED)])
    first = resuming.digest(task(many))
    assert first.startswith("60000:")
    assert resuming.digest(task(many)) == first
    assert resuming.digest(task([*many, {"prompt": "one more"}])) != first
    assert resuming.digest(task(many[::-1])) != first


class Rows(Letters):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    def __iter__(self) -> Iterator[Problem]:
        return iter([{"prompt": name} for name in self._names])


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return runner(tmp_path, monkeypatch)


def test_resumed_run_refuses_new_problems_and_logs_changes(running: Running) -> None:
    fixed: dict[str, Any] = {"save_interval": 1, "batch_size": 4, "group_size": 4}
    with running() as run:
        run.train(Rows(NAMES), training_steps=2, **fixed)
    with running() as run:
        with pytest.raises(UsageError, match="these are not the problems"):
            run.go_on(Rows([*NAMES, "a8"]), training_steps=4, **fixed)
        with pytest.raises(UsageError, match="in the order of --seed 0"):
            run.go_on(Rows(NAMES), training_steps=4, seed=1, **fixed)
        run.go_on(Rows(NAMES), training_steps=4, **(fixed | {"lr": 5e-4}))
        events = (run.folder / "run/events.log").read_text()
        assert " changed since step 2: lr 0.001 -> 0.0005\n" in events
        prompts = [json.loads(line)["problem"]["prompt"] for line in (run.folder / "run/rollouts.jsonl").open()]
    assert len(set(prompts)) == 4
