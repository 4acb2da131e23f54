import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bridge.checkpoints.metric_table import METRICS
from bridge.checkpoints.metrics import RECORDED, Evaluation, StepMetrics
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.run import reporting
from bridge.run.reporting import Trackers
from bridge.types import Completion, Group
from tests import metrics_table


def metrics(step: int, **changed: Any) -> StepMetrics:
    known: dict[str, Any] = {"step": step, "rollouts": "0a1b", "device": "cpu", "reward_parts": {"exact": 0.25}}
    known |= {"logprob_diff_histogram": (0.5, 0.25, 0, 0, 0, 0, 0, 0.25), "tokens_generated": 12, "rollout_s": 3.0}
    return StepMetrics(dict.fromkeys(RECORDED, 0.5) | {"lag_shares": (1.0,)} | known | changed)


def evaluation(step: int) -> Evaluation:
    return Evaluation(
        step=step, weight_version=step, reward_mean=0.75, reward_std=0.5, reward_parts={"exact": 0.5}, unscored=0,
        num_problems=8, completion_tokens_mean=4.0, truncated_share=0.0, seconds=1.0, pass_at_k={},
    )  # fmt: skip


def groups(text: str = "5") -> list[Group]:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason="stop", versions=(1,))
    return [
        Group(problem={"prompt": "nobody answers"}, prompt_token_ids=(1,), completions=(), rewards=()),
        Group(problem={"prompt": "2+3="}, prompt_token_ids=(1,), completions=(completion,), rewards=(1.0,)),
    ]


@dataclass
class FakeTracker:
    """A tracker that records its logs, and fails from the `fails_at`-th log on."""

    fails_at: int = 99
    logged: list[tuple[int, Mapping[str, float], str | None]] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        if len(self.logged) + 1 >= self.fails_at:
            raise OSError("No space left\non device")
        self.logged.append((step, values, sample))

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


class FakeWriter:
    """The part of `torch.utils.tensorboard.SummaryWriter` that Bridge uses."""

    made: list["FakeWriter"]

    def __init__(self, folder: str, *, purge_step: int, flush_secs: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int | None]] = []
        self.closed = False
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int | None = None) -> None:
        self.texts.append((name, text, step))

    def close(self) -> None:
        self.closed = True


class FakeWandb(ModuleType):
    """The part of `wandb` that Bridge uses."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.error, self.options, self.logged = error, [], []  # type: ignore[var-annotated]
        self.finished: list[int] = []
        self.Html = lambda text, *, inject: text
        self.Settings = SimpleNamespace

    def init(self, **options: Any) -> "FakeWandb":
        if self.error is not None:
            raise self.error
        self.options.append(options)
        return self

    def define_metric(self, names: str, *, step_metric: str) -> None:
        assert (names, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes only these packages appear installed."""

    def install(*packages: str, wandb: FakeWandb | None = None) -> FakeWandb:
        fake = wandb or FakeWandb()
        FakeWriter.made = []
        monkeypatch.setattr(reporting, "is_installed", lambda package: package in packages)
        tensorboard = ModuleType("torch.utils.tensorboard")
        tensorboard.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "WANDB_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        return fake

    return install


def config(**choices: Any) -> TrainConfig:
    return TrainConfig.of(model_name="m", start_command="TOKEN=secret vllm serve {model}", mode="none", **choices)


def trackers(config: TrainConfig, run: RunDirectory, *, first_step: int = 1) -> Trackers:
    return reporting.trackers_of(config.tracking, config.flat(), run, first_step=first_step)


def test_every_number_of_a_step_has_its_own_curve() -> None:
    curves = [METRICS[name].curve for name in RECORDED if name in METRICS]
    assert len(set(curves)) == len(curves)
    assert [name for name in RECORDED if name in METRICS and not METRICS[name].curve] == ["lag_shares"]
    values = metrics(1, fence_pause_s=0.004, groups_in_flight=0, my_ratio=0.75).curves()
    assert (values["fence/pause_ms"], values["rollout/tokens_per_s"], values["reward/part/exact"]) == (4.0, 4.0, 0.25)
    assert (values["loss/my_ratio"], values["fence/total_ms"]) == (0.75, 1004.0)
    shares = {name: value for name, value in values.items() if name.startswith("logprob_diff_share/")}
    assert [*shares][:1] + [*shares][-1:] == ["logprob_diff_share/below_0.001", "logprob_diff_share/from_1"]
    assert (len(shares), sum(shares.values())) == (8, 1.0)
    values = metrics(1, logprob_diff_mean=math.nan, grad_norm=math.inf).curves()
    assert not {"mismatch/logprob_diff_mean", "train/grad_norm"} & set(values)
    assert all(map(math.isfinite, values.values()))


def test_docs_list_every_metric() -> None:
    page = metrics_table.PAGE.read_text()
    assert page == metrics_table.replaced(page), "python -m tests.metrics_table rewrites it"
    assert page.count("| `") > len(METRICS)


def test_failing_tracker_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = FakeTracker(fails_at=2), FakeTracker()
    with Trackers(lambda: {"Bad": bad, "Good": good}, shows_texts=True) as tracked:
        for step in (1, 2, 3):
            tracked.step(metrics(step), groups())
        tracked.evaluation(evaluation(3))
    assert caplog.messages == ["Bad failed, and is no longer used in this run: OSError: No space left on device"]
    assert [step for step, _, _ in bad.logged] == [1]
    assert [step for step, _, _ in good.logged] == [1, 2, 3, 3]
    assert good.logged[-1][1]["held_out/reward_mean"] == 0.75
    assert (bad.closed, good.closed) == ([], [False])


def test_first_scored_completion_is_shown_if_texts_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    shown, silent = FakeTracker(), FakeTracker()
    Trackers(lambda: {"t": shown}, shows_texts=True).step(metrics(1), groups("a \ud83d half"))
    Trackers(lambda: {"t": silent}, shows_texts=False).step(metrics(1), groups())
    assert caplog.messages == []
    text = shown.logged[0][2]
    assert text == "2+3=\n\n--- reward 1.000 ---\n\na \\ud83d half"
    assert silent.logged[0][2] is None


def test_error_closes_the_trackers_as_failed() -> None:
    tracker = FakeTracker()
    tracked = Trackers(lambda: {"t": tracker}, shows_texts=True)
    with pytest.raises(KeyboardInterrupt), tracked:  # noqa: PT012
        tracked.phase("rollouts")
        raise KeyboardInterrupt
    assert tracker.closed == [True]


def test_installed_tensorboard_is_used_by_default(tmp_path: Path, installed: Any) -> None:
    run = RunDirectory(tmp_path)
    for packages, choice, is_used in ((["tensorboard"], None, 1), (["tensorboard"], False, 0), ([], None, 0)):
        installed(*packages)
        with trackers(config(tensorboard=choice), run) as tracked:
            tracked.phase("rollouts")
            assert len(FakeWriter.made) == is_used


def test_run_that_does_not_begin_opens_no_tracker(tmp_path: Path, installed: Any) -> None:
    fake = installed("tensorboard", "wandb")
    with trackers(config(wandb=True), RunDirectory(tmp_path)):
        pass
    assert (FakeWriter.made, fake.options, list(tmp_path.iterdir())) == ([], [], [])


def test_only_rank_0_draws_curves(tmp_path: Path, installed: Any) -> None:
    fake = installed("tensorboard", "wandb")
    with trackers(config(wandb=True), RunDirectory(tmp_path, is_writer=False)) as tracked:
        tracked.step(metrics(1), groups())
    assert (FakeWriter.made, fake.options, list(tmp_path.iterdir())) == ([], [], [])


def test_tensorboard_curves_continue_at_the_resumed_step(tmp_path: Path, installed: Any) -> None:
    installed("tensorboard")
    with trackers(config(), RunDirectory(tmp_path), first_step=3) as tracked:
        tracked.step(metrics(3), groups("# not *markdown*"))
    (writer,) = FakeWriter.made
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path / "tensorboard"), 3, True)
    assert {name: value for name, value, _ in writer.scalars} == metrics(3).curves()
    assert {step for _, _, step in writer.scalars} == {3}
    (_, choices, _), (_, sample, step) = writer.texts
    assert "secret" not in choices
    assert json.loads(choices)["model_name"] == "m"
    assert step == 3
    assert all(line.startswith("    ") for line in sample.splitlines())


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_missing_package_of_a_requested_tracker_is_refused(package: str, installed: Any) -> None:
    installed()
    reporting.check_trackers(config().tracking)
    with pytest.raises(UsageError, match="not installed") as refused:
        reporting.check_trackers(config(**{package: True}).tracking)
    assert refused.value.hint == f"pip install {package}, or leave --{package} out"


def test_folder_named_like_a_package_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bridge_tracker_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not reporting.is_installed("bridge_tracker_of_nobody")
    assert reporting.is_installed("torch")


def test_wandb_resumes_the_run_of_the_directory(tmp_path: Path, installed: Any) -> None:
    fake = installed("wandb")
    for first_step in (1, 2):
        with trackers(config(wandb=True), RunDirectory(tmp_path), first_step=first_step) as tracked:
            tracked.step(metrics(first_step), groups("<b>5"))
    first, second = fake.options
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text().strip()
    assert (first["resume"], first["project"], first["dir"]) == ("allow", "bridge", str(tmp_path))
    assert first["config"]["training_steps"] == 10
    assert first["config"]["start_command"] == "***"
    assert (first["config"]["lr"], first["config"]["max_new_tokens"]) == (1e-6, 256)
    assert [step["step"] for step in fake.logged] == [1, 2]
    assert "&lt;b&gt;5" in fake.logged[0]["sample"]
    assert fake.finished == [0, 0]


def test_wandb_environment_variables_take_precedence(
    tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = installed("wandb")
    own = {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_DIR": "/d", "WANDB_RUN_ID": "i"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    trackers(config(wandb=True), RunDirectory(tmp_path)).phase("rollouts")
    (options,) = fake.options
    assert [options[name] for name in ("project", "name", "dir", "id")] == ["p", "n", "/d", "i"]


def test_requested_tracker_that_fails_to_open_ends_the_run(tmp_path: Path, installed: Any) -> None:
    installed("tensorboard", "wandb", wandb=FakeWandb(RuntimeError("No API key configured")))
    with pytest.raises(UsageError, match="Weights & Biases cannot be used: RuntimeError: No API key") as refused:
        trackers(config(wandb=True), RunDirectory(tmp_path)).phase("rollouts")
    assert "--wandb" in refused.value.hint
    assert [writer.closed for writer in FakeWriter.made] == [True]


def test_default_tracker_that_fails_to_open_is_reported(
    tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed("tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    trackers(config(), RunDirectory(tmp_path)).step(metrics(1), groups())
    (line,) = caplog.messages
    assert line.startswith("TensorBoard cannot be used: ModuleNotFoundError")


def test_tensorboard_reads_the_written_events(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def write(first_step: int, rewards: Sequence[float]) -> None:
        with trackers(config(tensorboard=True), RunDirectory(tmp_path), first_step=first_step) as tracked:
            for step, reward in enumerate(rewards, first_step):
                tracked.step(metrics(step, reward_mean=reward), groups())

    write(1, [0.0, 0.25, 0.5])
    write(3, [1.0])
    read = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("reward/mean")] == [(1, 0.0), (2, 0.25), (3, 1.0)]
    assert "sample/text_summary" in read.Tags()["tensors"]
