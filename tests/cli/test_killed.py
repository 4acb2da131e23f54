"""A trainer killed with -9 between two checkpoints resumes as if it had never been killed, on a server without vLLM.

Not covered: the real vLLM (`tests/cpu/test_killed.py`), trainers killed inside the fence (`tests/cpu/test_restore.py`),
bit-equal weights, which take a deterministic sampler (`tests/unit/run/test_trainer_resume.py`), and saves killed at
random moments (`tests/unit/checkpoints/test_checkpoint.py`).
"""

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bridge.checkpoints import checkpoint
from bridge.core.address import free_port
from tests import disturbed, forked, scenarios
from tests.disturbed import UNDISTURBED, Disturbance
from tests.scenarios import LiveServer, different
from tests.unit import patched_server

pytestmark = pytest.mark.xdist_group("commands")

LIMIT_S = 300
STEPS, SAVE_INTERVAL, KILLED_IN_STEP = 8, 2, 6
LAST = f"step_{KILLED_IN_STEP - SAVE_INTERVAL}"
"""The last complete checkpoint when the trainer is killed."""
BATCH_SIZE = 8
NUM_PROBLEMS = 7
"""Fewer than a run draws, and not a multiple of a step's number, so that the second epoch begins within a step."""
ENVIRONMENT = f"""
class Numbered:
    def __iter__(self):
        yield from ({{"prompt": f"say {{number}}:"}} for number in range({NUM_PROBLEMS}))

    def score(self, problem, completion):
        return sum(map(ord, completion)) % 10 / 10
"""
PRELUDE = f"""
import os, resource, signal
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checkpoints import checkpoint

STEP = {KILLED_IN_STEP}

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
WHILE_IT_SAMPLES = Disturbance(fault="SIGKILL", phase="rollouts", step=KILLED_IN_STEP)
WHILE_IT_SAVES = Disturbance(fault="SIGKILL", phase="saving", step=KILLED_IN_STEP)
BEFORE_ITS_LINE = """
append = RunDirectory.append
RunDirectory.append = lambda self, metrics: die() if metrics.step == STEP else append(self, metrics)
"""
BEFORE_ITS_CHECKPOINT = """
save = checkpoint.save
checkpoint.save = lambda folder, *rest: die() if folder.name == f"step_{STEP}" else save(folder, *rest)
"""
FULL_AFTER_ITS_FIRST_CHECKPOINT = """
save = checkpoint.save

def save_and_fill(*given):
    saved = save(*given)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return saved

checkpoint.save = save_and_fill
"""


@dataclass
class Run:
    """One run, by one or more trainers."""

    server: LiveServer
    folder: Path

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    def train(self, *flags: str, expect: int, by: Disturbance | str = UNDISTURBED) -> list[str]:
        """Run one trainer to its end, and return the lines that it printed to stderr."""
        program = disturbed.program(by) if isinstance(by, Disturbance) else f"{PRELUDE}{by}\n{forked.BRIDGE}"
        done = forked.ended(self.arguments(*flags), self.folder, program=program, limit_s=LIMIT_S)
        assert done.returncode == expect, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr.splitlines()

    def arguments(self, *flags: str) -> list[str | Path]:
        """Return the arguments of `bridge`, and write the environment that they name."""
        (self.folder / "numbered.py").write_text(ENVIRONMENT)
        return [
            *("train", "--model-name", self.server.manifest.model, "--vllm-config-path", self.server.path),
            *("--environment", "numbered.py:Numbered", "--mismatch-alarm", "99", "--lr", "1e-3"),
            *("--training-steps", str(STEPS), "--save-interval", str(SAVE_INTERVAL), "--max-new-tokens", "48"),
            *("--batch-size", str(BATCH_SIZE), "--group-size", "4", "--save-path", "saved", *flags),
        ]

    def killed(self, by: Disturbance | str) -> None:
        """Start a run and kill it in step 6; the last checkpoint is complete and the server still serves."""
        self.train("--run-dir", "run", expect=-signal.SIGKILL, by=by)
        assert [path.name for path in visible(self.saved)] == ["step_2", LAST]
        assert self.server.status().state == "serving"
        self.server.sample()  # raises if it does not answer

    def lost(self) -> list[int]:
        """Return the steps whose metrics were moved aside."""
        lines = (self.folder / "run" / "metrics_lost.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def problems(self) -> dict[int, list[str]]:
        """Return the problems of each step that led to the current weights."""
        trained: dict[int, list[str]] = {}
        for line in (self.folder / "run" / "rollouts.jsonl").read_text().splitlines():
            group = json.loads(line)
            trained.setdefault(group["step"], []).append(group["problem"]["prompt"])
        return trained

    def check_whole(self) -> None:
        """Check that nothing is missing, duplicated or left behind, and that the server serves the last checkpoint."""
        rows = scenarios.metrics(self.folder / "run")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        steps = range(SAVE_INTERVAL, STEPS + 1, SAVE_INTERVAL)
        assert sorted(path.name for path in self.saved.iterdir()) == [f"step_{step}" for step in steps]
        assert [checkpoint.read(self.saved / f"step_{step}").progress.step for step in steps] == list(steps)
        served = self.server.status()
        assert (served.state, served.version) == ("serving", rows[-1]["weight_version"])
        assert different(self.server, self.saved / f"step_{STEPS}") == []
        assert running_in(self.folder) == []


def killed_at_random(run: Run, flags: Sequence[str], chance: random.Random) -> int:
    """Resume a trainer, kill it at a random moment some steps later, and return how many steps its metrics have."""
    metrics = run.folder / "run" / "metrics.jsonl"
    before = num_lines(metrics)
    trainer = forked.Command(run.arguments("--resume", *flags), run.folder)
    try:
        while num_lines(metrics) < before + chance.randint(4, 9):
            assert trainer.poll() is None, trainer.stderr
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
    finally:
        trainer.kill()
        trainer.wait()
    return num_lines(metrics)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def scratch(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.scratch"))


def running_in(folder: Path) -> list[psutil.Process]:
    """Return the processes whose working directory is `folder`: a trainer and its children."""
    processes = psutil.process_iter(["cwd"])
    return [process for process in processes if process.info["cwd"] == str(folder)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("killed")
    with patched_server.served(folder / "model", folder / "server", port=free_port("127.0.0.1")) as server:
        yield server


@pytest.fixture(scope="module")
def problems(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """The problems of each step of an undisturbed run."""
    return undisturbed(Run(server, tmp_path_factory.mktemp("undisturbed")))


def undisturbed(run: Run) -> dict[int, list[str]]:
    """Train to the end, and return the problems of each step."""
    run.train("--run-dir", "run", expect=0)
    run.check_whole()
    trained = run.problems()
    assert list(trained) == list(range(1, STEPS + 1))
    assert len({tuple(prompts) for prompts in trained.values()}) > STEPS // 2
    return trained


@pytest.fixture
def run(server: LiveServer, problems: dict[int, list[str]], tmp_path: Path) -> Run:
    return Run(server, tmp_path)


@pytest.mark.parametrize(
    ("by", "lost", "num_scratch"),
    [
        (WHILE_IT_SAMPLES, [5], 0),
        (BEFORE_ITS_LINE, [5], 0),
        (BEFORE_ITS_CHECKPOINT, [5, 6], 0),
        (WHILE_IT_SAVES, [5, 6], 1),
    ],
    ids=["while sampling", "before the metrics line", "before the checkpoint", "while saving"],
)
def test_killed_trainer_resumes_without_gap_or_repeat(
    run: Run, problems: dict[int, list[str]], by: Disturbance | str, lost: list[int], num_scratch: int
) -> None:
    run.killed(by)
    assert [path.name.startswith(f".step_{KILLED_IN_STEP}.") for path in scratch(run.saved)] == [True] * num_scratch
    lines = run.train("--resume", expect=0)
    assert lines[0] == f"resuming after step 4 from {run.saved.relative_to(run.folder) / LAST}"
    assert run.lost() == lost
    assert run.problems() == problems
    run.check_whole()


def test_truncated_checkpoint_falls_back_to_the_older_one(run: Run, problems: dict[int, list[str]]) -> None:
    run.killed(WHILE_IT_SAMPLES)
    os.truncate(run.saved / LAST / "model.safetensors", 1000)
    lines = run.train("--resume", expect=0)
    assert [line.partition(":")[0] for line in lines[:2]] == ["skipped", "resuming after step 2 from saved/step_2"]
    assert f"saved/{LAST} is incomplete or damaged: model.safetensors is truncated" in lines[0]
    assert not [line for line in lines[1:] if line.startswith("skipped")]
    assert run.lost() == [3, 4, 5]
    assert run.problems() == problems
    run.check_whole()


def test_full_disk_keeps_older_checkpoints(run: Run, problems: dict[int, list[str]]) -> None:
    before = run.server.status().version
    lines = run.train("--run-dir", "run", expect=2, by=FULL_AFTER_ITS_FIRST_CHECKPOINT)
    *_, error, gap, hint = lines
    assert error.startswith(f"error: cannot write {run.saved / LAST}: ")
    assert error.endswith(" bytes free)")
    assert (gap, hint[:6]) == ("", "hint: ")
    assert len([line for line in lines if line.startswith(("error:", "hint:"))]) == 2
    assert [path.name for path in run.saved.iterdir()] == ["step_2"]
    assert checkpoint.read(run.saved / "step_2").progress.step == 2
    assert (run.server.status().state, run.server.status().version) == ("serving", before + 4)
    run.server.sample()
    run.train("--resume", expect=0)
    assert run.lost() == [3, 4]
    assert run.problems() == problems
    run.check_whole()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repeatedly_killed_stream_trains_each_problem_once(server: LiveServer, tmp_path: Path) -> None:
    run, chance, num_steps = Run(server, tmp_path), random.Random(0), 200
    flags = ("--max-staleness", "3", "--training-steps", str(num_steps), "--save-interval", "1", "--keep-last", "2")
    for _ in range(20):
        killed_at_random(run, ("--run-dir", "run", *flags), chance)
    run.train("--run-dir", "run", "--resume", *flags, expect=0)
    rows = scenarios.metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["number"] for line in lines]
    num_groups = num_steps * BATCH_SIZE // 4
    assert len(set(numbers)) == len(numbers) == num_groups
    assert max(numbers) < num_groups + 3 * BATCH_SIZE // 4, "a problem was skipped"
