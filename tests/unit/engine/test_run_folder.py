"""The run directory of a user's own loop, over a toy server's memory: metrics, report, checkpoints and resuming.

Not covered: a loop that is killed on a real server (`tests/cpu/test_library.py`).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bridge
from bridge.checkpoints import checkpoint, model_export, optimizer_state
from bridge.checkpoints.run_directory import RunDirectory
from bridge.core import folder_claim
from bridge.errors import CheckpointError, ServerUnreachableError, UsageError
from bridge.modes import shared_vllm
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.types import Completion, Group
from bridge_cli.report import page, record
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.engine.test_policy import FenceClient, calls

Attach = Callable[..., bridge.Policy]


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """Return a function that attaches to the same toy server each time, with the run directory `run` by default."""
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    toy = toy_server.serve(tiny.llama(), tmp_path / "model")
    with ExitStack() as stack:

        def attached(run_dir: Path | None = tmp_path / "run") -> bridge.Policy:
            return stack.enter_context(toy_server.attach(toy.manifest, tmp_path, run_dir=run_dir))

        yield attached


def group(*rewards: float) -> Group:
    completion = Completion(token_ids=(5, 6), logprobs=(-1.0, -1.0), text="ab", finish_reason="stop")
    problem = {"prompt": "a", "answer": "b"}
    return Group(problem=problem, prompt_token_ids=(4,), completions=(completion,) * len(rewards), rewards=rewards)  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(policy: bridge.Policy, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take a step whose gradients depend on the step's number and on torch's random state."""
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter) * number
    policy.update(optimizer)
    policy.log(number, loss=float(torch.rand(())))


def weights(policy: bridge.Policy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


OPTIMIZERS: dict[str, Callable[[bridge.Policy], torch.optim.Optimizer]] = {
    "adamw": lambda policy: policy.optimizer("adamw", lr=1e-2),
    "adamw-8bit": lambda policy: policy.optimizer("adamw-8bit", lr=1e-2),
    "torch's AdamW": lambda policy: torch.optim.AdamW(policy.parameters(), lr=1e-2),
    "torch's SGD": lambda policy: torch.optim.SGD(policy.parameters(), lr=1e-2, momentum=0.9),
    "some parameters": lambda policy: policy.optimizer(lr=1e-2, params=[*policy.parameters()][:2]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_loop_repeats_its_steps_exactly(attach: Attach, tmp_path: Path, name: str) -> None:
    torch.manual_seed(3)
    policy = attach()
    optimizer = OPTIMIZERS[name](policy)
    assert policy.resume(optimizer) == 0
    for number in range(1, 6):
        step(policy, optimizer, number)
        if number == 2:
            saved = policy.save(step=number, optimizer=optimizer)
    assert saved == tmp_path / "run" / "checkpoints" / "step_2"
    logged, expected = lines(tmp_path / "run" / "metrics.jsonl"), weights(policy)
    policy.close()

    resumed = attach()
    optimizer = OPTIMIZERS[name](resumed)
    assert resumed.resume(optimizer) == 2
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2
    for number in range(3, 6):
        step(resumed, optimizer, number)
    repeated = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["loss"] for line in repeated] == [line["loss"] for line in logged]
    assert all(map(torch.equal, expected, weights(resumed)))
    assert calls(resumed)[:3] == ["lease", "pause", "publish"], "the checkpoint must be loaded inside the fence"


def test_save_has_the_state_of_the_optimizer_that_stepped(attach: Attach) -> None:
    policy = attach()
    optimizer = OPTIMIZERS["torch's SGD"](policy)
    step(policy, optimizer, 1)
    policy.save(step=1)
    step(policy, optimizer, 2)
    expected = weights(policy)
    policy.close()
    resumed = attach()
    optimizer = OPTIMIZERS["torch's SGD"](resumed)
    assert resumed.resume(optimizer) == 1
    step(resumed, optimizer, 2)
    assert all(map(torch.equal, expected, weights(resumed)))


def test_copied_run_resumes_from_its_own_checkpoints(attach: Attach, tmp_path: Path) -> None:
    policy = attach()
    optimizer = policy.optimizer(lr=1e-2)
    step(policy, optimizer, 1)
    policy.save(step=1, optimizer=optimizer)
    expected = weights(policy)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step(policy, optimizer, 2)
    policy.save(step=2, optimizer=optimizer)
    policy.close()
    resumed = attach(tmp_path / "copy")
    assert resumed.resume(resumed.optimizer(lr=1e-2)) == 1
    assert all(map(torch.equal, expected, weights(resumed)))


def test_sampling_seeds_continue_after_a_resume(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    async def one(*_: Any, seed: int, **__: Any) -> tuple[Completion, ...]:
        seeds.append(seed)
        return group(0.0).completions

    policy, resumed = attach(), None
    monkeypatch.setattr(policy._sampler, "one", one)
    for _ in range(3):
        policy.sample(["a"])
    optimizer = policy.optimizer(lr=1e-3)
    policy.save(step=1, optimizer=optimizer)
    policy.sample(["a"])
    policy.close()
    resumed = attach()
    assert resumed.resume(resumed.optimizer(lr=1e-3)) == 1
    monkeypatch.setattr(resumed._sampler, "one", one)
    resumed.sample(["a"])
    assert seeds[4] == seeds[3]
    assert len({*seeds}) == 4


def test_loops_checkpoint_has_bridges_format(attach: Attach, tmp_path: Path) -> None:
    policy = attach()
    optimizer = policy.optimizer(lr=1e-3)
    step(policy, optimizer, 1)
    saved = policy.save(step=1, optimizer=optimizer)
    progress = checkpoint.read(saved).progress
    assert (progress.step, progress.run_dir) == (1, tmp_path / "run")
    assert (model_export.export(saved, tmp_path / "exported").folder / "model.safetensors").is_file()


def test_report_reads_the_run_of_a_loop(attach: Attach, tmp_path: Path) -> None:
    policy = attach()
    with policy:
        for number in (1, 2, 3):
            step_s: dict[str, Any] = {"first": 1.0, "second": torch.tensor(float(number))}
            policy.log(number, [group(0.0, 1.0)], grad_norm=number / 2, my_metric=number**2, parts=step_s)
    run = record.read(tmp_path / "run")
    assert run.notes == []
    assert [*run.column("reward_mean")] == [0.5] * 3
    assert [*run.column("my_metric")] == [1.0, 4.0, 9.0]
    assert [*run.column("parts/second")] == [1.0, 2.0, 3.0]
    assert (run.column("step_s") > 0).all()
    assert page.status(run)[0] == "finished"
    text = page.html([run])
    assert "Other metrics" in text
    assert "my_metric" in text
    assert "parts: second" in text
    assert "version of Bridge does not know" not in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "low"}, "loss is 'low', expected a number"),
        ({"loss": torch.zeros(3)}, "loss is .*, expected a number"),
        ({"parts": {"a": None}}, r"parts\['a'\] is 'None'"),
    ],
)
def test_metric_that_is_not_a_number_is_refused_by_name(attach: Attach, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attach().log(1, **values)


def test_non_finite_metric_becomes_null(attach: Attach, tmp_path: Path) -> None:
    attach().log(0, loss=float("nan"), clipped=True, count=3)
    (line,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert (line["loss"], line["clipped"], line["count"]) == (None, 1, 3)


@pytest.mark.parametrize("number", [1, 0, -1, 1.5, True])
def test_steps_are_logged_once_and_in_order(attach: Attach, number: Any) -> None:
    policy = attach()
    policy.log(1, loss=0.0)
    with pytest.raises(UsageError, match=r"step .* (was logged after step 1|expected an integer)"):
        policy.log(number, loss=0.0)


def test_existing_run_is_not_overwritten(attach: Attach, tmp_path: Path) -> None:
    first = attach()
    first.log(1, loss=0.0)
    second = attach()
    with pytest.raises(UsageError, match="already holds a different run") as caught:
        second.log(1, loss=0.0)
    assert "policy.resume(OPTIMIZER)" in str(caught.value.hint)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="was not created by Bridge"):
        attach(tmp_path / "mine").log(1, loss=0.0)


@pytest.mark.parametrize("first", [0, 1])
def test_run_killed_before_its_first_checkpoint_restarts(attach: Attach, tmp_path: Path, first: int) -> None:
    attach().log(first, loss=0.0)
    resumed = attach()
    assert resumed.resume(resumed.optimizer(lr=1e-3)) == 0
    resumed.log(first, loss=1.0)
    assert [line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1.0]
    assert len(lines(tmp_path / "run" / "metrics_lost.jsonl")) == 1


def test_each_start_of_a_loop_is_recorded(attach: Attach, tmp_path: Path) -> None:
    attach().log(1, loss=0.0)
    resumed = attach()
    resumed.resume(resumed.optimizer(lr=1e-3))
    resumed.log(1, loss=0.0)
    starts = lines(tmp_path / "run" / "starts.jsonl")
    assert [start["torch"] for start in starts] == [torch.__version__] * 2


def test_loop_does_not_resume_a_command_line_run(attach: Attach, tmp_path: Path) -> None:
    """Otherwise the loop's configuration would replace the run's, and `bridge run --resume` would fail."""
    run = RunDirectory.create(tmp_path / "run", environment="arithmetic")
    run.config.write_text("{}")
    with pytest.raises(UsageError, match="is a run of Bridge, expected the run directory of a loop"):
        attach().resume()
    assert run.config.read_text() == "{}"


@pytest.mark.parametrize("own", [True, False])
def test_lost_server_leaves_the_optimizer_unchanged(attach: Attach, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """A half-loaded checkpoint would combine one step's weights with another step's moments."""
    policy = attach()
    optimizer = policy.optimizer(lr=1e-2) if own else torch.optim.AdamW(policy.parameters(), lr=1e-2)
    step(policy, optimizer, 1)
    policy.save(step=1, optimizer=optimizer)
    policy.close()
    resumed = attach()
    fresh = resumed.optimizer(lr=1e-2) if own else torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    before, random = weights(resumed), torch.get_rng_state()

    def lost(*_: Any, **__: Any) -> None:
        raise ServerUnreachableError("the server does not answer", hint="start it")

    monkeypatch.setattr(FenceClient, "pause", lost)
    with pytest.raises(ServerUnreachableError):
        resumed.resume(fresh)
    assert all(map(torch.equal, before, weights(resumed)))
    assert torch.equal(random, torch.get_rng_state())
    if isinstance(fresh, InPlaceOptimizer):
        assert not any(fresh.num_updates(parameter) for parameter in resumed.parameters())
    else:
        assert not fresh.state


def test_resuming_without_a_folder_or_too_late_is_refused(attach: Attach) -> None:
    policy = attach(None)
    with pytest.raises(UsageError, match="no run to resume"):
        policy.resume(policy.optimizer(lr=1e-3))
    reader = attach()
    reader._reads_only = True
    with pytest.raises(UsageError, match="is read-only"):
        reader.resume(reader.optimizer(lr=1e-3))
    late = attach()
    late.log(1, loss=0.0)
    with pytest.raises(UsageError, match="has already begun"):
        late.resume(late.optimizer(lr=1e-3))


@pytest.mark.parametrize("other", ["adamw-8bit", "torch's AdamW", "some parameters"])
def test_checkpoint_of_a_different_optimizer_is_refused(attach: Attach, other: str) -> None:
    policy = attach()
    optimizer = OPTIMIZERS["adamw"](policy)
    step(policy, optimizer, 1)
    policy.save(step=1, optimizer=optimizer)
    policy.close()
    resumed = attach()
    with pytest.raises((CheckpointError, UsageError)):
        resumed.resume(OPTIMIZERS[other](resumed))
    assert "pause" not in calls(resumed)


def test_parameters_in_a_different_order_are_refused(attach: Attach) -> None:
    policy = attach()
    optimizer = OPTIMIZERS["torch's AdamW"](policy)
    step(policy, optimizer, 1)
    policy.save(step=1, optimizer=optimizer)
    policy.close()
    resumed = attach()
    ordered = [*resumed.parameters()]
    first, second = next(
        (one, other)
        for one, other in combinations(range(len(ordered)), 2)
        if ordered[one].shape == ordered[other].shape
    )
    ordered[first], ordered[second] = ordered[second], ordered[first]
    with pytest.raises(CheckpointError, match="or are in a different order"):
        resumed.resume(torch.optim.AdamW(ordered, lr=1e-2))
    assert "pause" not in calls(resumed)


def test_state_on_a_parameters_device_is_listed() -> None:
    """A fused AdamW keeps its step counter on that device, and fails with a counter on the CPU."""
    there, here = torch.zeros(2, 2, device="meta"), torch.zeros(2, 2)
    for parameter, expected in ((there, ["step", "exp_avg"]), (here, ["exp_avg"])):
        optimizer = torch.optim.AdamW([parameter])
        optimizer.state[parameter] = {"step": parameter.new_zeros(()), "exp_avg": parameter.clone(), "maximize": 1}
        assert optimizer_state._state_of(parameter, optimizer)[1] == expected


def test_optimizer_with_non_tensor_state_is_refused(attach: Attach, tmp_path: Path) -> None:
    policy = attach()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    optimizer.state[next(iter(policy.parameters()))]["history"] = [1, 2]
    with pytest.raises(UsageError, match="SGD keeps 'history' as a list"):
        policy.save(step=1, optimizer=optimizer)
    assert not (tmp_path / "run" / "checkpoints" / "step_1").exists()


def test_loop_without_a_folder_gets_one_under_runs(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["my_loop.py"])
    attach(None).log(1, loss=0.5)
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.endswith("-my_loop")
    assert folder_claim.is_claimed(made)


def test_saving_without_a_step_or_folder_is_refused(attach: Attach, tmp_path: Path) -> None:
    policy = attach()
    wrongs: list[dict[str, Any]] = [{}, {"folder": tmp_path / "x", "optimizer": policy.optimizer(lr=1e-3)}]
    for wrong in wrongs:
        with pytest.raises(UsageError, match=r"neither a folder nor a step|an optimizer, but no step"):
            policy.save(**wrong)
