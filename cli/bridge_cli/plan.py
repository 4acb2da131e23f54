"""`bridge plan`: which setups fit on a GPU, by mode and optimizer, and the command for the most precise one."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text

from bridge.checks import model as model_checks
from bridge.checks.model import MODES, Obstacle
from bridge.config import ServeConfig, TrainConfig, combinations
from bridge.core.host_memory import left_bytes
from bridge.errors import UnsupportedModelError, UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB, SERVERS_GPU
from bridge.planning.model_size import ModelSize, folder_of
from bridge.planning.setups import Limits, Row, command, plan_rows
from bridge.processes import accelerator
from bridge.types import Quantization
from bridge_cli import console, rank_gpus
from bridge_cli.options import Json, from_config, option

SHOWN = {
    "model", "mode", "optimizer", "offload_optimizer", "gradient_release", "batch_size", "max_new_tokens",
    "micro_batch_tokens", "gradient_checkpointing", "activation_offload", "kv_sleep", "max_model_len", "lora_r",
    "lora_target_modules", "gpus", "tensor_parallel_size", "context_parallel_size", "quantization",
}  # fmt: skip
"""Choices in the help text; every other choice of `bridge run` is accepted too."""
HIDDEN = tuple({*ServeConfig.model_fields, *TrainConfig.choices()} - SHOWN)
HOST = "Host memory in GiB (default: this machine's; with --gpu-memory, no limit)."
GpuMemory = Annotated[
    float | None, option("--gpu-memory", "GIB", "GPU memory in GiB (default: this machine's).", min=1)
]
HostMemory = Annotated[float | None, option("--host-memory", "GIB", HOST, min=1)]
Everything = Annotated[bool, option("--all", "", "List every setup, not only the recommended one.")]

TITLES = {
    "shared_vllm": "--mode shared_vllm, weights once",
    "lora_only": "--mode lora_only, weights once and an adapter",
    "none": "--mode none, weights twice",
}
STYLES = {"fits": "bold green", "fits asleep": "green", "does not fit": "red"}
WIDTHS = {"grads": 5, "state": 8, "act.": 5, "KV": 5, "asleep": 6, "tokens": 6}
NAME_WIDTH, VERDICT_WIDTH = 26, 11
LEGEND = """
act.: activations of the smallest micro-batch worth training with, recomputed
KV, asleep: left for the KV cache; with --kv-sleep always, asleep while training"""
WORDS = {
    "offloaded": "offloaded: --offload-optimizer, the state in host memory",
    "released": "released: --gradient-release, each gradient is used and freed at once",
}
"""Explanation of a word in a row's name."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits, and the commands for it."""

    model: str
    num_params: int
    exact: bool  # whether the parameters were counted in the model's files
    num_gpus: int
    gpu_gib: float  # per GPU
    host_gib: float | None  # None: unknown
    least_kv_tokens: int
    rows: tuple[Row, ...]
    obstacles: tuple[Obstacle, ...]
    sight: str  # what the vision tower is used for; empty: the model has none
    recommended: str | None  # command for the most precise setup that fits
    recommended_without_host: str | None  # the same without host memory, if `recommended` uses it


@from_config(ServeConfig, TrainConfig, hide=HIDDEN)
def plan(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Print the command for the most precise setup that fits on a GPU.

    --all lists every setup with its memory; flags such as --mode and --optimizer narrow the list.
    """
    folder = folder_of(serve.model, fetch=True)
    obstacles = _obstacles(folder, serve.quantization, train.publishing.reload)
    modes = _open_modes(serve.model, train.mode if train.was_given("mode") else None, obstacles)
    size = ModelSize.of(folder).quantized(serve.quantization, beside=train.publishing.reload != "transfer")
    if gpu_memory is None:
        gpus: list[float] = [*accelerator.gpu_memory_bytes()]
        host_bytes: float = left_bytes()
    else:
        gpus = [gpu_memory * GIB]
        host_bytes = math.inf  # another machine's host memory is unknown
    if not gpus:
        raise UsageError("this machine has no GPU to plan for", hint="give its memory in GiB: --gpu-memory 80")
    if host_memory is not None:
        host_bytes = host_memory * GIB
    rank_gpus.check_divides(serve.model, serve.tensor_parallel_size, train.context_parallel_size)
    tp_size = train.tp_size(serve.tensor_parallel_size)
    replicated = train.changed(gpus=train.dp_size(tp_size))
    longest = memory.sequence_tokens(replicated.sampling)
    least_kv = memory.least_kv_tokens(replicated.completions_per_replica, longest, serve.max_model_len)
    limits = Limits(min(gpus), host_bytes, least_kv)
    given = train.given()
    rows = plan_rows(size, replicated, limits, modes, serve.tensor_parallel_size, tp_size)
    best = next((row for row in rows if not row.lacking_gib), None)
    other = next((row for row in rows if not row.lacking_gib and not row.host_gib), None)
    planned = Plan(
        model=serve.model,
        num_params=size.num_params,
        exact=size.exact,
        num_gpus=replicated.gpus * serve.tensor_parallel_size,
        gpu_gib=limits.gpu_bytes / GIB,
        host_gib=limits.host_bytes / GIB if math.isfinite(limits.host_bytes) else None,
        least_kv_tokens=limits.kv_tokens,
        rows=tuple(rows),
        obstacles=tuple(obstacles),
        sight=model_checks.sight(model_checks.read(str(folder)) or {}),
        recommended=command(best, size, serve, given, longest) if best else None,
        recommended_without_host=command(other, size, serve, given, longest) if other and best is not other else None,
    )
    if as_json:
        console.data(json.dumps(asdict(planned), allow_nan=False))
    else:
        _show(planned, everything=everything)


def _obstacles(model: Path, quantization: Quantization | None, reload: str) -> list[Obstacle]:
    """Return the obstacles that rule out modes: the model's architecture, and choices that exclude mode `none`."""
    obstacles = model_checks.obstacles(model_checks.read(str(model)) or {})
    excluded = combinations.error(mode="none", quantization=quantization, reload=reload)
    if excluded is not None:
        obstacles.append(Obstacle(excluded.message, excluded.hint, modes=(model_checks.NONE,)))
    return obstacles


def _open_modes(name: str, chosen: str | None, obstacles: Sequence[Obstacle]) -> list[str]:
    """Return which modes, or whether the `chosen` one, can train the model; `bridge doctor --model` agrees."""
    requested = (chosen,) if chosen else MODES
    modes = [mode for mode in requested if not any(mode in obstacle.modes for obstacle in obstacles)]
    if not modes:
        first = next(obstacle for obstacle in obstacles if requested[0] in obstacle.modes)
        by = f" by --mode {chosen}" if chosen else ""
        raise UnsupportedModelError(f"{name} cannot be trained{by}: {first.reason}", hint=first.hint)
    return modes


def _show(plan: Plan, *, everything: bool) -> None:
    """Print the recommended setup, or the ones closest to fitting if none fits; with `everything`, print them all."""
    counted = "counted in the model's files" if plan.exact else "estimated from its dimensions"
    where = f" on each of {plan.num_gpus} GPUs" if plan.num_gpus > 1 else " of GPU memory"
    console.note(f"{plan.num_params / 1e9:.2f}B parameters, {counted}; {plan.gpu_gib:.1f} GiB{where}")
    console.note(f"KV cache: at least {plan.least_kv_tokens:,} tokens; all sizes in GiB")
    if plan.sight:
        console.note(f"{plan.sight}; its vision model stays frozen in vLLM's memory")
    for obstacle in plan.obstacles:
        console.note(f"cannot use {' or '.join(f'--mode {mode}' for mode in obstacle.modes)}: {obstacle.reason}")
    best = next((row for row in plan.rows if not row.lacking_gib), None)
    if best is None:
        console.note("\nnothing fits: try a smaller --batch-size, --max-new-tokens or --max-model-len", style="bold")
    else:
        _show_recommended(plan, best)
    shown: Sequence[Row] = plan.rows
    if not everything and best is not None:
        shown = [best]
    elif not everything:  # the setup closest to fitting, per mode and device
        shown = [min(section, key=lambda row: row.lacking_gib) for _, section in groupby(plan.rows, _trainer_of)]
    for (mode, device), section in groupby(shown, _trainer_of):
        _show_section(mode, device, list(section))
    lines = [LEGEND, *(line for word, line in WORDS.items() if any(word in row.name for row in shown))]
    if most := max(row.sums_gib for row in shown):
        lines.append(
            f"grads: in bf16; with more than {memory.FEW} micro-batches per update they are summed in float32\n"
            f"if that fits, in up to {most:.1f} GiB more"
        )
    console.note("\n".join(lines), style="dim")
    if len(shown) < len(plan.rows):
        console.note(f"\n--all lists {len(plan.rows) - len(shown)} more")


def _trainer_of(row: Row) -> tuple[str, str]:
    return row.mode, row.trainer_device


def _show_recommended(plan: Plan, best: Row) -> None:
    console.note("\nthe most precise setup that fits:", style="bold")
    console.note(f"  {plan.recommended}")
    if best.host_gib and plan.host_gib is not None:
        console.note(f"it takes {best.host_gib:.0f} of {plan.host_gib:.0f} GiB of host memory")
    elif best.host_gib:
        console.note(f"it needs {best.host_gib:.0f} GiB of host memory; --host-memory GIB sets the limit")
    if plan.recommended_without_host:
        console.note("the most precise setup that needs no host memory:", style="bold")
        console.note(f"  {plan.recommended_without_host}")


def _show_section(mode: str, device: str, rows: Sequence[Row]) -> None:
    own_device = "" if device in SERVERS_GPU else f", the trainer on {device}"
    console.note(f"\n{TITLES[mode]}{own_device}", style="bold")
    rest = "contexts, temporaries, vLLM's buffers and graphs"
    console.note(f"{rows[0].weights_gib:.1f} for weights, {rows[0].rest_gib:.1f} for {rest}", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("--lora-handover" if mode == "lora_only" else "--optimizer", width=NAME_WIDTH)
    for name, width in WIDTHS.items():
        table.add_column(name, justify="right", width=width)
    table.add_column("", width=VERDICT_WIDTH)
    for row in rows:
        state = f"{row.host_gib:.0f} host" if row.host_gib else f"{row.state_gib:.1f}"
        kv_tokens = tokens(row.kv_tokens)
        verdict = row.verdict
        if row.lacking_gib:
            kv_tokens = ""
            digits = 0 if row.lacking_gib >= 100 else 1
            verdict = f"lacks {row.lacking_gib:.{digits}f}"
        table.add_row(
            row.name,
            f"{row.gradients_gib:.1f}",
            state,
            f"{row.activations_gib:.1f}",
            *(f"{gib:.1f}" if gib else "-" for gib in (row.kv_awake_gib, row.kv_asleep_gib)),
            kv_tokens,
            Text(verdict, STYLES[row.verdict]),
        )
    console.people.print(table)


def tokens(count: int) -> str:
    """Return a number of tokens in thousands or millions."""
    if count < 1e6:
        return f"{count / 1e3:.0f}k"
    digits = 2 if count < 1e8 else 0
    return f"{count / 1e6:.{digits}f}M"
