"""`bridge plan`: what fits on a GPU, per mode and optimizer, and what a run then used.

Not covered: the ways that are weighed (`plan_rows.py`), how they are shown (`plan_table.py`), runs (`plan_run.py`).
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from bridge.checks.memory import available_bytes, cgroup_left_bytes
from bridge.config import ServeConfig, TrainConfig
from bridge.errors import UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB
from bridge.planning.model_size import ModelSize
from cli import accelerator, console, plan_run, plan_table
from cli.options import Json, from_config
from cli.plan_rows import Limits, command, plan_rows

SHOWN = {
    "model", "mode", "optimizer", "offload_optimizer", "gradient_release", "batch_size", "max_new_tokens",
    "micro_batch_tokens", "gradient_checkpointing", "kv_sleep", "max_model_len", "lora_r",
}  # fmt: skip
"""Choices in the help text; every other one of `bridge run` is understood as well."""
HIDDEN = tuple({*ServeConfig.model_fields, *TrainConfig.model_fields} - SHOWN)

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
Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="PATH", show_default=False, help="Run directory whose trainer is to be compared."),
]


@from_config(ServeConfig, TrainConfig, hide=HIDDEN)
def plan(
    serve: ServeConfig, train: TrainConfig, *, gpu_memory: GpuMemory = None, run: Run = None, as_json: Json = False
) -> None:
    """Print what fits on a GPU, per mode and optimizer, and the command for the most exact way that does.

    A --mode, an --optimizer and the like that are given leave the other rows out.
    """
    size = ModelSize.of(serve.model)
    limits = _limits(gpu_memory, memory.least_kv_tokens(train, serve.max_model_len))
    rows = plan_rows(size, train, limits)
    best = next((row for row in rows if not row.lacking_gib), None)
    recommended = None if best is None else command(best, size, serve, train)
    comparison = None if run is None else plan_run.compare(size, run)
    if not as_json:
        plan_table.show(size, limits, rows, recommended, comparison)
        return
    document = {
        "model": serve.model,
        "num_params": size.num_params,
        "exact": size.exact,
        "gpu_gib": limits.gpu_bytes / GIB,
        "least_kv_tokens": limits.kv_tokens,
        "rows": [dataclasses.asdict(row) for row in rows],
        "recommended": recommended,
        "run": None if comparison is None else dataclasses.asdict(comparison),
    }
    console.data(json.dumps(document, allow_nan=False))


def _limits(gpu_memory: float | None, kv_tokens: int) -> Limits:
    """Return what a GPU of the given size has, or else this machine, GPU and host."""
    if gpu_memory is not None:
        return Limits(gpu_bytes=gpu_memory * GIB, host_bytes=float("inf"), kv_tokens=kv_tokens)
    here = accelerator.gpu_memory_bytes()
    if not here:
        raise UsageError("there is no GPU here to plan for", remedy="name its memory in GiB, such as --gpu-memory 80")
    available, left = available_bytes(), cgroup_left_bytes()
    return Limits(
        gpu_bytes=min(here), host_bytes=available if left is None else min(available, left), kv_tokens=kv_tokens
    )
