"""How a training job begins and ends: the order of its actions, whatever stops it.

Not covered: the last lines themselves (`test_run_ending.py`), several ranks (`test_rank_launcher.py`), whole runs
(`test_fault_matrix.py`, `test_signals.py`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import SamplingConfig, TrainConfig
from bridge.errors import UsageError
from bridge.ranks import messages
from bridge_cli import launch
from bridge_cli.launch import Launch, ReplicaServer, Servers
from bridge_cli.rank_gpus import RankLayout
from tests.cli.test_run_directory import metrics


class RecordedServers(Servers):
    """Servers that record the calls they get, and fail in one of them."""

    tp_degree = 1
    max_model_len = None

    def __init__(self, fails_in: str = "", error: BaseException | None = None) -> None:
        self.steps = list[str]()
        self._fails_in = fails_in
        self._error = error

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name == self._fails_in and self._error is not None:
            raise self._error

    def check(self) -> None:
        self.step("check")

    def prepare(self, sampling: SamplingConfig) -> SamplingConfig:
        self.step("prepare")
        return sampling

    def record(self, run: RunDirectory, checkpoints: Path) -> None:
        self.step("record")

    @contextlib.contextmanager
    def serving(self, world: Any, sampling: SamplingConfig, run: RunDirectory) -> Iterator[ReplicaServer]:
        self.step("start")
        try:
            yield ReplicaServer({"vllm_port": 9009}, None)
        finally:
            self.step("stop")


def launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servers: RecordedServers, *, layout: RankLayout | None = None
) -> list[str]:
    """Launch a job that trains by writing one line of metrics, and return what was done."""
    given = TrainConfig.of(model_name="m", rollouts="atropos", tensorboard=False)

    def train_on(
        server: ReplicaServer,
        config: TrainConfig,
        environment: None,
        run: RunDirectory,
        *,
        chosen: TrainConfig,
        **_: Any,
    ) -> None:
        assert chosen is given
        assert config.checkpoints.save_path == run.checkpoints
        run.append(metrics(1))
        servers.step("train")

    def print_ending(run: RunDirectory, *_: object) -> None:
        servers.step("print the ending")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "train_on", train_on)
    monkeypatch.setattr(launch, "print_ending", print_ending)
    with contextlib.suppress(KeyboardInterrupt, RuntimeError, UsageError):
        Launch(config=given, servers=servers, layout=layout, as_json=False).start()
    return servers.steps


BEFORE = ["check", "prepare", "record"]
RUN = [*BEFORE, "start", "train", "stop", "print the ending"]


@pytest.mark.parametrize("layout", [None, RankLayout(1, "", [None])], ids=["inside a rank", "single process"])
def test_job_runs_checks_server_training_and_ending_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: RankLayout | None
) -> None:
    assert launched(monkeypatch, tmp_path, RecordedServers(), layout=layout) == RUN
    assert len([*tmp_path.glob("runs/*/metrics.jsonl")]) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_failed_training_stops_its_server_and_prints_the_ending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    assert launched(monkeypatch, tmp_path, RecordedServers("train", error)) == RUN


@pytest.mark.parametrize(
    ("fails_in", "steps"),
    [("check", BEFORE[:1]), ("prepare", BEFORE[:2]), ("record", BEFORE), ("start", [*BEFORE, "start", RUN[-1]])],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("no room", hint="make some")])
def test_job_that_never_trained_leaves_no_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails_in: str, steps: list[str], error: BaseException
) -> None:
    assert launched(monkeypatch, tmp_path, RecordedServers(fails_in, error)) == steps
    assert not [*tmp_path.rglob("*")]


def test_opened_run_can_be_sent_to_other_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    given = TrainConfig.of(model_name="m", rollouts="atropos", tensorboard=False)
    job = Launch(config=given, servers=RecordedServers(), layout=None, as_json=False)
    config, run_dir, resume = messages.loads(messages.dumps(job._open(None, [])))
    assert job.directory is not None
    assert run_dir == job.directory.path
    assert config.checkpoints.save_path == job.directory.checkpoints
    assert resume is None


def test_several_ranks_are_launched_before_anything_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layouts = list[RankLayout]()

    def launch_ranks(layout: RankLayout) -> int:
        layouts.append(layout)
        return 7

    monkeypatch.setattr("bridge_cli.rank_launcher.launch", launch_ranks)
    two = RankLayout(1, "cpu", [None, None])
    for layout in (two, dataclasses.replace(two, gpus=[None], hosts=2)):
        servers = RecordedServers()
        with pytest.raises(SystemExit) as ended:
            launched(monkeypatch, tmp_path, servers, layout=layout)
        assert (ended.value.code, servers.steps, layouts.pop()) == (7, [], layout)
