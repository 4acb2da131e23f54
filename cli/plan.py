"""`bridge plan`: what fits on a GPU, per mode and optimizer, and what a run then used.

Not covered: the ways that are weighed (`plan_rows.py`), how they are shown (`plan_table.py`), runs (`plan_run.py`).
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bridge.checks import model
from bridge.checks.model import MODES, Obstacle
from bridge.config import ServeConfig, TrainConfig
from bridge.core.memory import left_bytes
from bridge.errors import UnsupportedModelError, UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB
from bridge.planning.model_size import ModelSize, folder_of
from cli import accelerator, console, plan_run, plan_table
from cli.options import Json, from_config
from cli.plan_rows import Limits, plan_rows, recommend

SHOWN = {
    "model", "mode", "optimizer", "offload_optimizer", "gradient_release", "batch_size", "max_new_tokens",
    "micro_batch_tokens", "gradient_checkpointing", "kv_sleep", "max_model_len", "lora_r",
}  # fmt: skip
"""Choices in the help text; every other one of `bridge run` is understood as well."""
HIDDEN = tuple({*ServeConfig.model_fields, *TrainConfig.choices()} - SHOWN)

GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory",
        metavar="GIB",
        min=1,
        show_default=False,
        help="Memory of the GPU to plan for, in GiB; absent: this machine's.",
    ),
]
HostMemory = Annotated[
    float | None,
    typer.Option(
        "--host-memory",
        metavar="GIB",
        min=1,
        show_default=False,
        help="Main memory to plan for, in GiB; absent: this machine's, or any amount with --gpu-memory.",
    ),
]
Everything = Annotated[
    bool, typer.Option("--all", metavar="", show_default=False, help="Show every way, not the recommended one alone.")
]
Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="PATH", show_default=False, help="Run directory whose trainer is to be compared."),
]


@from_config(ServeConfig, TrainConfig, hide=HIDDEN)
def plan(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    everything: Everything = False,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Print the command for the most exact way to train that fits on a GPU; with --all every way, and what it takes.

    A --mode, an --optimizer and the like that are given leave the other ways out.
    """
    folder = folder_of(serve.model, fetch=True)
    against = model.obstacles(model.read(str(folder)) or {})
    modes = _open_modes(serve.model, train, against)
    size = ModelSize.of(folder)
    limits = _limits(gpu_memory, host_memory, memory.least_kv_tokens(train, serve.max_model_len))
    rows = plan_rows(size, train, limits, modes)
    best = recommend(rows, size, serve, train)
    comparison = None if run is None else plan_run.compare(size, run)
    if not as_json:
        plan_table.show(size, limits, rows, best, against, comparison, everything=everything)
        return
    document = {
        "model": serve.model,
        "num_params": size.num_params,
        "exact": size.exact,
        "gpu_gib": limits.gpu_bytes / GIB,
        "host_gib": limits.host_bytes / GIB if math.isfinite(limits.host_bytes) else None,
        "least_kv_tokens": limits.kv_tokens,
        "rows": [dataclasses.asdict(row) for row in rows],
        "obstacles": [dataclasses.asdict(obstacle) for obstacle in against],
        "recommended": best and best.command,
        "recommended_without_host": best and best.without_host,
        "run": None if comparison is None else dataclasses.asdict(comparison),
    }
    console.data(json.dumps(document, allow_nan=False))


def _open_modes(name: str, train: TrainConfig, against: Sequence[Obstacle]) -> list[str]:
    """Return the modes by which the model can be trained, as `bridge doctor --model` finds them.

    Raises:
        UnsupportedModelError: there is none, or not the one that was given.
    """
    asked = (train.mode,) if "mode" in train.model_fields_set else MODES
    ruled_out = {mode for obstacle in against for mode in obstacle.modes}
    modes = [mode for mode in asked if mode not in ruled_out]
    if not modes:
        first = next(obstacle for obstacle in against if asked[0] in obstacle.modes)
        by = f" by --mode {train.mode}" if len(asked) == 1 else ""
        raise UnsupportedModelError(f"{name} cannot be trained{by}: {first.reason}", remedy=first.remedy)
    return modes


def _limits(gpu_gib: float | None, host_gib: float | None, kv_tokens: int) -> Limits:
    """Return what a GPU and a host of the given sizes have, or else this machine's."""
    gpus = accelerator.gpu_memory_bytes() if gpu_gib is None else [gpu_gib * GIB]
    if not gpus:
        raise UsageError("there is no GPU here to plan for", remedy="name its memory in GiB, such as --gpu-memory 80")
    host_bytes = left_bytes() if gpu_gib is None else math.inf  # of another machine nothing is known
    return Limits(
        gpu_bytes=min(gpus), host_bytes=host_bytes if host_gib is None else host_gib * GIB, kv_tokens=kv_tokens
    )
