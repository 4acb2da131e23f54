"""`bridge plan`: which setups fit on a GPU, by mode and optimizer, and what a run used compared with its plan."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from bridge.checks import model
from bridge.checks.model import MODES, Obstacle
from bridge.config import ServeConfig, TrainConfig
from bridge.core.memory import left_bytes
from bridge.errors import UnsupportedModelError, UsageError
from bridge.planning import memory
from bridge.planning.memory import GIB, SERVERS_GPU, Need
from bridge.planning.model_size import ModelSize, folder_of
from bridge.run.run_directory import RunDirectory
from bridge_cli import accelerator, console, ranks
from bridge_cli.options import Json, from_config, option
from bridge_cli.plan_rows import Limits, Row, command, plan_rows

SHOWN = {
    "model", "mode", "optimizer", "offload_optimizer", "gradient_release", "batch_size", "max_new_tokens",
    "micro_batch_tokens", "gradient_checkpointing", "kv_sleep", "max_model_len", "lora_r", "gpus",
    "tensor_parallel_size",
}  # fmt: skip
"""Choices in the help text; every other choice of `bridge run` is accepted too."""
HIDDEN = tuple({*ServeConfig.model_fields, *TrainConfig.choices()} - SHOWN)

GpuMemory = Annotated[
    float | None, option("--gpu-memory", "GIB", "GPU memory in GiB (default: this machine's).", min=1)
]
HostMemory = Annotated[
    float | None,
    option("--host-memory", "GIB", "Host memory in GiB (default: this machine's; with --gpu-memory, no limit).", min=1),
]
Everything = Annotated[bool, option("--all", "", "List every setup, not only the recommended one.")]
Run = Annotated[Path | None, option("--run", "PATH", "Compare with what the run in this directory used.")]

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
PARTS = {
    "weights_gib": "weights beside vLLM's",
    "state_gib": "optimizer's state",
    "gradients_gib": "gradients",
    "temporaries_gib": "temporaries",
    "least_activations_gib": "activations, at least",
    "planned_gib": "planned",
    "measured_gib": "measured",
}
"""Names in the table of the parts of a run's memory."""


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
    """Print the command for the most precise setup that fits on a GPU.

    --all lists every setup with its memory; flags such as --mode and --optimizer narrow the list.
    """
    folder = folder_of(serve.model, fetch=True)
    against = model.obstacles(model.read(str(folder)) or {})
    modes = _open_modes(serve.model, train, against)
    size = ModelSize.of(folder)
    gpus = accelerator.gpu_memory_bytes() if gpu_memory is None else [gpu_memory * GIB]
    if not gpus:
        remedy = "give its memory in GiB, such as --gpu-memory 80"
        raise UsageError("this machine has no GPU to plan for", remedy=remedy)
    host_bytes = left_bytes() if gpu_memory is None else math.inf  # that of another machine is unknown
    host_bytes = host_bytes if host_memory is None else host_memory * GIB
    tp_size = ranks.tp_size(train, serve)
    replicated = train.changed(gpus=ranks.dp_size(train, tp_size))
    limits = Limits(min(gpus), host_bytes, memory.least_kv_tokens(replicated, serve.max_model_len))
    rows = plan_rows(size, replicated, limits, modes, serve.tensor_parallel_size, tp_size)
    fitting = [row for row in rows if not row.lacking_gib]
    best = next(iter(fitting), None)
    lean = next((row for row in fitting if not row.host_gib), None) if best and best.host_gib else None
    recommended, without_host = (command(row, size, serve, train) if row else None for row in (best, lean))
    comparison = None if run is None else _compare(size, RunDirectory(run))
    if as_json:
        document = {
            "model": serve.model,
            "num_params": size.num_params,
            "exact": size.exact,
            "gpu_gib": limits.gpu_bytes / GIB,
            "host_gib": limits.host_bytes / GIB if math.isfinite(limits.host_bytes) else None,
            "least_kv_tokens": limits.kv_tokens,
            "rows": [dataclasses.asdict(row) for row in rows],
            "obstacles": [dataclasses.asdict(obstacle) for obstacle in against],
            "recommended": recommended,
            "recommended_without_host": without_host,
            "run": comparison,
        }
        console.data(json.dumps(document, allow_nan=False))
        return
    counted = "counted in its files" if size.exact else "estimated from its dimensions"
    num_gpus = replicated.gpus * serve.tensor_parallel_size
    each = f" on each of {num_gpus} GPUs" if num_gpus > 1 else " of GPU memory"
    console.note(f"{size.num_params / 1e9:.2f}B parameters, {counted}; {limits.gpu_bytes / GIB:.1f} GiB{each}")
    console.note(f"KV cache: at least {limits.kv_tokens:,} tokens; all sizes in GiB")
    for obstacle in against:
        console.note(f"not with {' or '.join(f'--mode {mode}' for mode in obstacle.modes)}: {obstacle.reason}")
    _show_recommended(best, recommended, without_host, limits)
    nearest = [min(place, key=lambda row: row.lacking_gib) for _, place in groupby(rows, _place)]
    shown = rows if everything else [best] if best else nearest
    _show_rows(shown)
    if len(shown) < len(rows):
        console.note(f"\n--all lists {len(rows) - len(shown)} more")
    if comparison is not None:
        _show_comparison(comparison)


def _open_modes(name: str, train: TrainConfig, against: Sequence[Obstacle]) -> list[str]:
    """Return the modes that can train the model, as `bridge doctor --model` finds them."""
    asked = (train.mode,) if train.was_given("mode") else MODES
    modes = [mode for mode in asked if not any(mode in obstacle.modes for obstacle in against)]
    if not modes:
        first = next(obstacle for obstacle in against if asked[0] in obstacle.modes)
        by = f" by --mode {train.mode}" if len(asked) == 1 else ""
        raise UnsupportedModelError(f"{name} cannot be trained{by}: {first.reason}", remedy=first.remedy)
    return modes


def _compare(size: ModelSize, run: RunDirectory) -> dict[str, Any]:
    """Compare what the trainer of a run allocated, without vLLM's weights, with its plan, in GiB."""
    try:
        config = TrainConfig.of(**run.choices())
    except OSError as error:
        raise UsageError(f"{run.path} is not a run: no {run.config.name}", remedy="--run runs/TIME-TASK") from error
    except ValidationError as error:
        fault = error.errors()[0]
        raise UsageError(
            f"{run.config} was not written by this Bridge: {'.'.join(map(str, fault['loc']))}: {fault['msg']}",
            remedy="use the version of Bridge that made the run",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{run.config} is damaged: {error}", remedy="name another run, or plan without --run"
        ) from error
    lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("}")]  # a killed process may leave half a line
    if not steps:
        raise UsageError(f"{run.path} has no step to compare", remedy="name a run that trained")
    device, measured = steps[-1].get("device"), steps[-1]["peak_memory_gib"]
    why_not = "" if device == "cuda" else "the run was on the CPU, where the whole process is measured"
    if device is None:
        why_not = "the run did not record its device"
    need = Need.of(size, config, gpu_bytes=0)
    return {
        "run": str(run.path),
        "steps": len(steps),
        "weights_gib": need.own / GIB,
        "state_gib": need.state / GIB,
        "gradients_gib": need.gradients / GIB,
        "temporaries_gib": need.temporaries / GIB,
        "least_activations_gib": need.least_activations / GIB,
        "most_activations_gib": need.most_activations / GIB,
        "planned_gib": need.allocated / GIB,
        "measured_gib": measured,
        "ratio": None if why_not else measured * GIB / need.allocated,
        "why_not": why_not,
    }


def _place(row: Row) -> tuple[str, str]:
    return row.mode, row.trainer_device


def _show_recommended(best: Row | None, recommended: str | None, without_host: str | None, limits: Limits) -> None:
    if best is None:
        console.note("\nnothing fits: try a smaller --batch-size, --max-new-tokens or --max-model-len", style="bold")
        return
    console.note("\nthe most precise setup that fits:", style="bold")
    console.note(f"  {recommended}")
    if best.host_gib and math.isfinite(limits.host_bytes):
        console.note(f"it takes {best.host_gib:.0f} of {limits.host_bytes / GIB:.0f} GiB of host memory")
    elif best.host_gib:
        console.note(f"it needs {best.host_gib:.0f} GiB of host memory; --host-memory GIB sets the limit")
    if without_host:
        console.note("the most precise setup that needs no host memory:", style="bold")
        console.note(f"  {without_host}")


def _show_rows(rows: Sequence[Row]) -> None:
    for (mode, device), section in groupby(rows, _place):
        _show_section(mode, device, list(section))
    lines = [LEGEND, *(line for word, line in WORDS.items() if any(word in row.name for row in rows))]
    if most := max(row.sums_gib for row in rows):
        lines.append(
            f"grads: in bf16; with more than {memory.FEW} micro-batches an update they are summed in float32\n"
            f"if that fits, in up to {most:.1f} GiB more"
        )
    console.note("\n".join(lines), style="dim")


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
        lacking = row.lacking_gib
        table.add_row(
            row.name,
            f"{row.gradients_gib:.1f}",
            f"{row.host_gib:.0f} host" if row.host_gib else f"{row.state_gib:.1f}",
            f"{row.activations_gib:.1f}",
            *(f"{gib:.1f}" if gib else "-" for gib in (row.kv_awake_gib, row.kv_asleep_gib)),
            "" if lacking else tokens(row.kv_tokens),
            Text(f"lacks {lacking:.{0 if lacking >= 100 else 1}f}" if lacking else row.verdict, STYLES[row.verdict]),
        )
    console.people.print(table)


def tokens(count: int) -> str:
    """Return a number of tokens in thousands or millions."""
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _show_comparison(run: Mapping[str, Any]) -> None:
    console.note(f"\n{run['run']}, step {run['steps']}: peak memory of its trainer", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", width=NAME_WIDTH)
    table.add_column("", justify="right")
    for key, name in PARTS.items():
        table.add_row(name, f"{run[key]:.1f}")
    console.people.print(table)
    if run["most_activations_gib"] > run["least_activations_gib"]:
        most = run["most_activations_gib"]
        console.note(f"its micro-batches could grow, up to {most:.1f} for activations", style="dim")
    console.note(f"no ratio: {run['why_not']}" if run["ratio"] is None else f"{run['ratio']:.2f} times the plan")
