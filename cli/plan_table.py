"""How `bridge plan` shows what fits, at 80 columns.

Not covered: what is shown (`plan_rows.py`, `plan_run.py`).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from bridge.checks.model import Obstacle
from bridge.planning.memory import GIB, SERVERS_GPU
from bridge.planning.model_size import ModelSize
from cli import console
from cli.plan_rows import Limits, Recommended, Row
from cli.plan_run import Comparison

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
    "offloaded": "offloaded: --offload-optimizer, the state in the host's memory",
    "released": "released: --gradient-release, each gradient used and dropped as it comes",
}
"""Word in a row's name -> what it stands for."""


def show(
    size: ModelSize,
    limits: Limits,
    rows: Sequence[Row],
    best: Recommended | None,
    against: Sequence[Obstacle],
    comparison: Comparison | None,
    *,
    everything: bool,
) -> None:
    """Print the plan for a person: what is recommended, what that takes, and with `everything` all other ways."""
    counted = "counted in its files" if size.exact else "estimated from its dimensions"
    console.note(f"{size.num_params / 1e9:.2f}B parameters, {counted}; {limits.gpu_bytes / GIB:.1f} GiB of GPU memory")
    console.note(f"KV cache: at least {limits.kv_tokens:,} tokens; all sizes in GiB")
    for obstacle in against:
        console.note(f"not by {' or '.join(f'--mode {mode}' for mode in obstacle.modes)}: {obstacle.reason}")
    _show_recommended(best, limits)
    shown = rows if everything else [best.row] if best else _nearest(rows)
    for (mode, device), section in groupby(shown, lambda row: (row.mode, row.trainer_device)):
        _show_section(mode, device, list(section))
    _show_legend(shown)
    if len(shown) < len(rows):
        console.note(f"\n{len(rows) - len(shown)} other ways, and how each fits: --all")
    if comparison is not None:
        _show_run(comparison)


def _show_recommended(best: Recommended | None, limits: Limits) -> None:
    if best is None:
        console.note("\nnothing fits: a smaller --batch-size, --max-new-tokens or --max-model-len may", style="bold")
        return
    console.note("\nthe most exact way that fits:", style="bold")
    console.note(f"  {best.command}")
    if best.row.host_gib and math.isfinite(limits.host_bytes):
        console.note(f"it takes {best.row.host_gib:.0f} of {limits.host_bytes / GIB:.0f} GiB of host memory")
    elif best.row.host_gib:
        console.note(f"it needs {best.row.host_gib:.0f} GiB of host memory: --host-memory GIB plans with what there is")
    if best.without_host:
        console.note("the most exact way that needs no host memory:", style="bold")
        console.note(f"  {best.without_host}")


def _nearest(rows: Sequence[Row]) -> list[Row]:
    """Return the way that lacks the least in each place, where nothing fits."""
    places = groupby(rows, lambda row: (row.mode, row.trainer_device))
    return [min(place, key=lambda row: row.lacking_gib) for _, place in places]


def _show_legend(rows: Sequence[Row]) -> None:
    lines = [LEGEND, *(line for word, line in WORDS.items() if any(word in row.name for row in rows))]
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
        table.add_row(row.name, *_cells(row), Text(_verdict(row), STYLES[row.verdict]))
    console.people.print(table)


def _cells(row: Row) -> tuple[str, ...]:
    """Return gradients, state, activations, and what is left for the KV cache awake, asleep, and in tokens."""
    return (
        f"{row.gradients_gib:.1f}",
        f"{row.host_gib:.0f} host" if row.host_gib else f"{row.state_gib:.1f}",
        f"{row.activations_gib:.1f}",
        _left(row.kv_awake_gib),
        _left(row.kv_asleep_gib),
        "" if row.lacking_gib else tokens(row.kv_tokens),
    )


def _left(gib: float | None) -> str:
    return f"{gib:.1f}" if gib else "-"


def tokens(count: int) -> str:
    """Return a number of tokens in thousands or millions."""
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _verdict(row: Row) -> str:
    lacking = row.lacking_gib
    return row.verdict if not lacking else f"lacks {lacking:.0f}" if lacking >= 100 else f"lacks {lacking:.1f}"


def _show_run(run: Comparison) -> None:
    console.note(f"\n{run.run}, step {run.steps}: what its trainer had allocated at most", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", width=NAME_WIDTH)
    table.add_column("", justify="right")
    for name, gib in _parts(run):
        table.add_row(name, f"{gib:.1f}")
    console.people.print(table)
    if run.most_activations_gib > run.least_activations_gib:
        console.note(
            f"its micro-batches were free to grow, to {run.most_activations_gib:.1f} for activations", style="dim"
        )
    console.note(f"no ratio: {run.why_not}" if run.ratio is None else f"{run.ratio:.2f} times what was planned")


def _parts(run: Comparison) -> Iterator[tuple[str, float]]:
    yield "weights beside vLLM's", run.weights_gib
    yield "optimizer's state", run.state_gib
    yield "gradients", run.gradients_gib
    yield "temporaries", run.temporaries_gib
    yield "activations, at least", run.least_activations_gib
    yield "planned", run.planned_gib
    yield "measured", run.measured_gib
