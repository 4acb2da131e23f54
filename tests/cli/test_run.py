import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.checkpoints.metrics import Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checks import failed, passed
from bridge.config import TrainConfig
from bridge.core import folder_mark
from bridge.errors import UsageError
from bridge.ranks.world import ALONE
from bridge.run.trainer import Run
from bridge_cli import demo, live, verify
from bridge_cli.launch import ReplicaServer, train_on
from bridge_cli.started_servers import StartedServers
from tests.cli.test_run_directory import evaluation, metrics


def test_step_is_printed_in_one_line() -> None:
    step = metrics(3, rollout_s=2.0, fence_pause_s=0.004, fence_write_s=0.002, fence_publish_s=0.001,
                   tokens_generated=4000, completion_tokens_mean=37.2)  # fmt: skip
    line = live.step_line(step, 60)
    assert "\n" not in line
    for part in (
        "step  3/60", "reward  0.500", "len    37", "truncated  50%", "entropy 0.500", "grad 0.500",
        "|dlogprob| 0.5000",         "fence   7.0 ms", "2,000 tok/s",
    ):  # fmt: skip
        assert part in line
    assert "max" not in line
    nothing = live.step_line(metrics(3, completion_tokens_mean=math.nan, truncated_share=math.nan), 60)
    assert "len     -  truncated    -" in nothing


def summary(folder: Path, *, reward_before: float, reward_after: float) -> Summary:
    return Summary(
        steps=2, updates=1, weight_version=2, checkpoint=folder / "step_2", reward_before=reward_before,
        reward_after=reward_after, rewards=(0.5, 0.5), logprob_diff_max=math.nan, fence_p50_ms=1.0, attach_ms=2.0,
        weight_bytes=0,
    )  # fmt: skip


def test_json_of_a_run_has_steps_evaluations_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    came_to = summary(tmp_path, reward_before=0.25, reward_after=0.5)

    def trained(run: Run) -> Summary:
        run._reporter.phase("evaluation")
        run._reporter.evaluation(evaluation(0, 0.25))
        run._reporter.step(metrics(1, loss=math.nan), [])
        return came_to

    monkeypatch.setattr(Run, "train", trained)
    folder = RunDirectory.create(tmp_path / "run", environment="letters")
    config = TrainConfig.of(model_name="m", rollouts="atropos", tensorboard=False)
    server = ReplicaServer({}, None)
    assert train_on(server, config, None, folder, resume=None, ranks=ALONE, as_json=True) is came_to
    out, err = capfd.readouterr()
    first, second, last = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert (first["evaluation"]["step"], first["evaluation"]["reward_mean"]) == (0, 0.25)
    assert (second["step"], second["loss"]) == (1, None)
    assert last["summary"]["checkpoint"] == str(tmp_path / "step_2")
    assert last["summary"]["run_dir"] == str(tmp_path / "run")
    assert (last["summary"]["updates"], last["summary"]["logprob_diff_max"]) == (1, None)
    assert "max   -" in err
    assert "nan" not in err.splitlines()[-1]


def test_every_check_is_printed_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [passed("storages", "2 of 2", "all"), failed("digests", "1 differs", "0 differ", "restart the server")]
    assert verify.shown(iter(checks), as_json=True) == checks
    out, err = capsys.readouterr()
    assert [json.loads(line)["status"] for line in out.splitlines()] == ["PASS", "FAIL"]
    assert "restart the server" in err


def test_demo_replaces_only_its_own_run(tmp_path: Path) -> None:
    ours = demo._fresh(tmp_path / "demo")
    ours.summary.write_text("{}")
    (ours.checkpoints / "step_60").mkdir(parents=True)
    (ours.path / ".config.json.4711-ab").touch()  # left by a killed process
    renewed = demo._fresh(tmp_path / "demo")
    assert [path.name for path in renewed.path.iterdir()] == [folder_mark.NAME]


def test_demo_of_a_missing_model_keeps_the_earlier_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "check_software", lambda _: None)
    monkeypatch.setattr(StartedServers, "preloading", lambda _: nullcontext())
    earlier = demo._fresh(tmp_path / "demo")
    earlier.summary.write_text("{}")
    with pytest.raises(UsageError, match="there is no such folder"):
        demo.demo(out=earlier.path, device="cpu", model=str(tmp_path / "missing"))
    assert earlier.summary.exists()


@pytest.mark.parametrize(("after", "least_gain", "is_passed"), [(0.5, 0.2, True), (0.3, 0.2, False), (0.1, None, True)])
def test_demo_requires_only_the_tiny_model_to_learn(
    tmp_path: Path, after: float, least_gain: float | None, is_passed: bool
) -> None:
    ended = summary(tmp_path, reward_before=0.25, reward_after=after)
    one_copy = passed("storages", "2 of 2", "all")
    assert demo.conclusion(ended, [one_copy], least_gain=least_gain)["passed"] == is_passed
    assert not demo.conclusion(replace(ended, updates=0, reward_after=0.25), [one_copy], least_gain=least_gain)[
        "passed"
    ]
    two_copies = failed("storages", "1 of 2", "2 of 2", "restart the server")
    assert not demo.conclusion(ended, [one_copy, two_copies], least_gain=least_gain)["passed"]


def test_users_own_model_gets_a_suitable_task(tmp_path: Path) -> None:
    serve, train = demo._choices(tmp_path, 5, "cpu", 1, "mine")
    assert (serve.model, train.model_name, train.task.environment) == ("mine", "mine", "word_problems")
    with pytest.raises(UsageError, match="--model and --model-only cannot be combined"):
        demo.demo(model="mine", model_only=tmp_path)


@pytest.mark.parametrize(("dtype", "served"), [("float16", "bfloat16"), ("bfloat16", "auto")])
def test_demo_serves_a_model_in_a_trainable_dtype(dtype: str, served: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
    serve, _ = demo._choices(tmp_path / "out", 5, "cpu", 1, str(tmp_path))
    assert serve.dtype == served


def test_demo_into_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file, expected a folder") as caught:
        demo._fresh(tmp_path / "file")
    assert "--out" in caught.value.hint


def a_model(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")


def a_run(folder: Path) -> None:
    RunDirectory.create(folder, environment="math").write_config(TrainConfig.of(model_name="m").document())


def a_demo_with_a_thesis(folder: Path) -> None:
    demo._fresh(folder).summary.write_text("{}")
    (folder / "thesis.txt").write_text("precious")


@pytest.mark.parametrize("make", [a_model, a_run, a_demo_with_a_thesis])
def test_only_an_earlier_demo_is_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    make(folder)
    (tmp_path / "link").symlink_to(folder)
    before = sorted(folder.rglob("*"))
    for out in (folder, tmp_path / "link"):
        with pytest.raises(UsageError, match=r"is not empty and does not contain|did not create: thesis") as refused:
            demo._fresh(out)
        assert "--out" in refused.value.hint
    assert sorted(folder.rglob("*")) == before
