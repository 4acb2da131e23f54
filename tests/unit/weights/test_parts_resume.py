"""A tensor-parallel run saves the same as one process, and resumes with any number of ranks, bit-exactly with the same.

Not covered: a real server (`tests/cpu/test_tensor_parallel.py`).
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bridge.checkpoints import checkpoint
from bridge.checkpoints.metrics import Summary
from bridge.checkpoints.run_directory import RunDirectory
from bridge.config import TrainConfig
from bridge.ranks.world import ALONE, Ranks
from bridge.run.reporting import Reporter
from bridge.run.trainer import Run
from bridge.weights import model_folder
from bridge.weights.adapter import Adapter
from bridge.weights.attach import OpenedModel
from bridge.weights.rank_parts import Parts
from tests.models import tiny, vllm_cuts
from tests.unit.several_ranks import on_ranks
from tests.unit.trainer_runs import FakeMode, Letters, runner

NUM_PARTS = 2
LIMIT_S = 240.0


def into_parts(mode: FakeMode, ranks: Ranks) -> None:
    """Make a mode open, save and restore only this rank's part."""

    def opened() -> OpenedModel:
        whole = FakeMode.open(mode)
        shapes = {name: parameter.shape for name, parameter in whole.model.named_parameters()}
        parts = Parts(cuts=vllm_cuts.cuts(whole.model.config, shapes, ranks.tp_size), tp_group=ranks.tp_group)
        for name, parameter in whole.model.named_parameters():
            parameter.data = parts.own[name].of(parameter.detach()).clone()
        source, model = mode.server.manifest.model, whole.model

        def save(folder: Path) -> None:
            model_folder.save(model, source, folder, parts)

        mode.save = save  # type: ignore[method-assign]
        mode.send_parts = lambda: model_folder.send_parts(model, parts)  # type: ignore[attr-defined]

        def restore(checkpoint: Path, *, version: int) -> None:
            model_folder.load_into(model, checkpoint, parts)
            mode.version = version

        mode.restore = restore  # type: ignore[method-assign]
        return replace(whole, cuts=parts.cuts)

    mode.open = opened  # type: ignore[method-assign]


def with_adapter(mode: FakeMode, ranks: Ranks) -> None:
    """Make a mode train an adapter on this rank's part of the weights, or on all of them."""

    def opened() -> OpenedModel:
        base = FakeMode.open(mode)
        config = TrainConfig.of(model_name="tiny", mode="lora_only", lora_r=4)
        shapes = {name: parameter.shape for name, parameter in base.model.named_parameters()}
        cuts = vllm_cuts.cuts(base.model.config, shapes, ranks.tp_size) if ranks.world_size > 1 else ()
        for name, parameter in base.model.named_parameters() if cuts else ():
            parameter.data = cuts[ranks.tp_rank][name].of(parameter.detach()).clone()
        adapter = Adapter(
            base.model, config.lora, seed=config.seed, base_name=config.model_name, cuts=cuts, tp_group=ranks.tp_group
        )
        mode.save, mode.send_parts = adapter.save, adapter.send_parts  # type: ignore[attr-defined, method-assign]

        def restore(checkpoint: Path, *, version: int) -> None:
            adapter.load(checkpoint)
            mode.version = version

        mode.restore = restore  # type: ignore[method-assign]
        return replace(base, lr_factors=adapter.lr_factors(), cuts=adapter.cuts)

    mode.open = opened  # type: ignore[method-assign]


def ran(ranks: Ranks, folder: Path, name: str, steps: int, adapts: bool, choices: dict[str, Any]) -> Summary:
    """Train up to step `steps`, from the newest checkpoint in `saved` if there is one; `saved` names the run."""
    with pytest.MonkeyPatch.context() as patched, ExitStack() as serving:
        patched.setattr(tiny, "write", lambda *_: None)  # the model already exists
        fake = serving.enter_context(runner(folder / str(ranks.rank), patched)())
        if adapts:
            with_adapter(fake.mode, ranks)
        elif ranks.world_size > 1:
            into_parts(fake.mode, ranks)
        run_folder = folder / f"{name}-{steps}"
        saved = folder / name
        config = fake.config(save_path=saved, training_steps=steps, save_interval=1, **choices)
        newest, _ = checkpoint.newest(saved, "step_")
        made = RunDirectory.create(run_folder, environment="letters") if ranks.is_rank_zero else None
        ranks.all_gather_object(None)
        run = made or RunDirectory.join(run_folder)
        return Run(config, Letters(), run, Reporter(), resume=newest, ranks=ranks).train()


def content(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, including the optimizer's state."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def equal(one: Path, other: Path) -> Sequence[str]:
    """Return the names of the tensors in which two checkpoints differ."""
    ours, theirs = content(one), content(other)
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


@pytest.mark.parametrize(
    ("size", "adapts", "choices"),
    [
        (2, False, {}),
        (2, False, {"optimizer": "adamw-8bit"}),
        (4, False, {"offload_optimizer": True}),
        (2, True, {}),
    ],
    ids=["adamw", "adamw-8bit", "offloaded, two replicas", "an adapter"],
)
def test_run_resumes_with_the_same_or_another_rank_count(
    tmp_path: Path, size: int, adapts: bool, choices: dict[str, Any]
) -> None:
    for rank in range(size):
        tiny.write(tiny.llama(), tmp_path / str(rank) / "model")

    def in_parts(name: str, steps: int) -> None:
        given = tmp_path, name, steps, adapts, choices
        for outcome in on_ranks(size, ran, *given, tp_size=NUM_PARTS, limit_s=LIMIT_S):
            assert isinstance(outcome, Summary), outcome

    in_parts("whole", 3)
    shutil.copytree(tmp_path / "whole" / "step_2", tmp_path / "again" / "step_2")
    in_parts("again", 3)
    if "optimizer" not in choices:  # quantized states are encoded again
        assert equal(tmp_path / "whole" / "step_3", tmp_path / "again" / "step_3") == []
    ran(ALONE, tmp_path, "again", 4, adapts, choices)
    in_parts("again", 5)
    steps = checkpoint.numbered(tmp_path / "again", "step_")
    assert sorted(steps) == [2, 3, 4, 5]
    for step in (3, 4, 5):
        assert len(equal(steps[step - 1], steps[step])) > 20, "nothing was learnt"
