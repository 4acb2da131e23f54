"""`bridge compare`: the same task, model and seed through every mode, and one table of what each costs and reaches.

Each mode is one `bridge run` in a process of its own, so that its memory is its own.

Not covered: the modes (`bridge/modes`), and absolute times on a CPU, which mean little.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from bridge.core import claim, mark
from bridge.errors import BridgeError
from bridge.run.run_directory import RunDirectory, write_json
from cli import accelerator, console
from cli.demo import HOST, LEARNING_RATE, Where, demo_model_folder
from cli.options import Json
from cli.serve import free_port
from cli.verify import FAILED_EXIT_CODE

LORA = ("--mode", "lora_only", "--lora-r", "8", "--lora-alpha", "16", "--lr", "2e-3")
"""The demo's model is so small that its adapter needs a larger learning rate than its weights."""
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "shared_vllm": ("--mode", "shared_vllm", "--lr", str(LEARNING_RATE)),
    "none": ("--mode", "none", "--lr", str(LEARNING_RATE)),
    "lora_only, memory": (*LORA, "--lora-handover", "memory"),
    "lora_only, disk": (*LORA, "--lora-handover", "disk"),
}
"""Row of the table -> the flags of its run."""
SAME_WAY = (("shared_vllm", "none"), ("lora_only, memory", "lora_only, disk"))
"""Pairs that train the same numbers, and differ in how these reach the server."""
TASK = ("--environment", "arithmetic", "--batch-size", "128", "--max-new-tokens", "4", "--eval-samples", "16")
RESULT = "compare.json"
LEAST_GAIN = 0.1
"""Held-out reward that a run of full length has to gain."""

Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Where the runs go; an earlier comparison there goes.")
]
Steps = Annotated[int, typer.Option("--steps", metavar="INTEGER", min=2, help="Optimizer steps of each mode.")]
Restarts = Annotated[
    int, typer.Option("--restarts", metavar="INTEGER", min=1, help="Steps of mode none, which restarts vLLM at each.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="INTEGER", min=0, help="Seed of all runs.")]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one mode cost and reached."""

    mode: str
    """Which, and how it hands over."""
    steps: int
    """Optimizer steps."""
    sync_ms: float
    """Median over the steps of everything but the write that lies between an update and its first token, in ms."""
    weight_bytes: int
    """Bytes of weights that the trainer holds beside the server's."""
    trainer_peak_gib: float
    """Most memory that the trainer held, in GiB: of the GPU, or of the process on the CPU."""
    reward_before: float
    """Held-out reward before the first step."""
    reward_after: float
    """The same after the last step."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two runs of the same seed went the same way."""

    runs: tuple[str, str]
    """Which two."""
    steps: int
    """Steps that both took."""
    same_rollouts: int
    """Steps whose sampled tokens were the same, every one."""
    same_rewards: int
    """Steps whose mean reward was the same."""
    reward_diff_max: float
    """Largest difference of a step's mean reward."""


def compare(
    *,
    out: Out = Path("runs/compare"),
    steps: Steps = 60,
    restarts: Restarts = 6,
    seed: Seed = 0,
    device: Where = "auto",
    as_json: Json = False,
) -> None:
    """Train the demo's model by every mode, and print what each costs and reaches.

    Exit code 3 when one does not learn or, on a CPU, two disagree: a GPU sums in an order that changes with its load.
    """
    folder = _fresh(out)
    model = demo_model_folder()
    documents = {}
    for variant, flags in VARIANTS.items():
        count = restarts if variant == "none" else steps
        console.note(f"{variant}: {count} steps", style="bold")
        run = RunDirectory(folder / _folder_name(variant))
        _run(run, model, [*flags, "--training-steps", str(count), "--seed", str(seed), "--device", device])
        documents[variant] = _results(run)
    rows = [row(variant, *results) for variant, results in documents.items()]
    agreements = [agree(pair, *(documents[variant][0] for variant in pair)) for pair in SAME_WAY]
    exactly = accelerator.choose(device)[0] == "cpu"
    faults = [*judge(rows, agreements if exactly else [], steps)]
    document = {
        "rows": [asdict(each) for each in rows],
        "agreements": [asdict(each) for each in agreements],
        "faults": faults,
    }
    write_json(folder / RESULT, document)
    _print(rows, agreements, faults)
    if as_json:
        console.data(json.dumps(document))
    if faults:
        raise typer.Exit(FAILED_EXIT_CODE)


def row(mode: str, steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Row:
    """Return the row of one run from its metrics and its summary."""
    return Row(
        mode=mode,
        steps=len(steps),
        sync_ms=1e3 * statistics.median(step["fence_pause_s"] + step["fence_publish_s"] for step in steps),
        weight_bytes=summary["weight_bytes"],
        trainer_peak_gib=steps[-1]["peak_memory_gib"],
        reward_before=summary["reward_before"],
        reward_after=summary["reward_after"],
    )


def agree(runs: tuple[str, str], one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Agreement:
    """Compare two runs step by step, as far as the shorter one goes."""
    pairs = list(zip(one, other, strict=False))
    return Agreement(
        runs=runs,
        steps=len(pairs),
        same_rollouts=sum(left["rollouts"] == right["rollouts"] for left, right in pairs),
        same_rewards=sum(left["reward_mean"] == right["reward_mean"] for left, right in pairs),
        reward_diff_max=max(abs(left["reward_mean"] - right["reward_mean"]) for left, right in pairs),
    )


def judge(rows: Sequence[Row], agreements: Sequence[Agreement], steps: int) -> Iterator[str]:
    """Yield what is wrong with a comparison whose `agreements` have to be complete."""
    yield from (_in_words(each) for each in agreements if each.same_rollouts < each.steps)
    for each in rows:
        if each.steps == steps and each.reward_after - each.reward_before < LEAST_GAIN:
            yield f"{each.mode} gained {each.reward_after - each.reward_before:.3f}, expected at least {LEAST_GAIN}"


def _in_words(agreement: Agreement) -> str:
    return (
        f"{' | '.join(agreement.runs)}: the same rollouts in {agreement.same_rollouts} of {agreement.steps} steps,"
        f" the same reward in {agreement.same_rewards}, largest difference {agreement.reward_diff_max:.3f}"
    )


def _fresh(out: Path) -> Path:
    """Return `out`, empty: an earlier comparison there is removed, and nothing else."""
    names = {RESULT, *(_folder_name(variant) for variant in VARIANTS)}
    folder = mark.make_empty(out, "comparison", names, flag="--out")
    claim.make(folder, what="folder of the comparison", flag="--out")
    mark.put(folder, "comparison")
    return folder


def _folder_name(variant: str) -> str:
    return variant.replace(", ", "-")


def _run(run: RunDirectory, model: Path, flags: Sequence[str]) -> None:
    places = ["--run-dir", str(run.path), "--vllm-config-path", str(run.manifest), "--port", str(free_port(HOST))]
    command = [sys.executable, "-c", "from cli.main import main; main()", "run", "--model", str(model)]
    share = ["--gpu-memory-utilization", "0.2"]  # of a GPU, for a model of a megabyte
    code = subprocess.run([*command, *TASK, *places, *flags, *share], check=False, stdout=subprocess.DEVNULL).returncode
    if code:
        raise RunFailedError(
            f"bridge run ended with exit code {code}: see above", remedy=f"its files are in {run.path}"
        )


class RunFailedError(BridgeError):
    """One of the runs ended in an error, which it has told itself."""

    exit_code = FAILED_EXIT_CODE


def _results(run: RunDirectory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return steps, json.loads(run.summary.read_text())


def _print(rows: Sequence[Row], agreements: Sequence[Agreement], faults: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False)
    for name, justify in COLUMNS.items():
        table.add_column(name, justify=justify, no_wrap=justify == "left")
    for each in rows:
        table.add_row(
            each.mode,
            str(each.steps),
            f"{each.sync_ms:,.1f} ms",
            f"{each.weight_bytes / 2**20:.2f} MiB",
            f"{each.trainer_peak_gib:.2f} GiB",
            f"{each.reward_before:.3f} -> {each.reward_after:.3f}",
        )
    console.people.print()
    console.people.print(table)
    for agreement in agreements:
        console.note(_in_words(agreement))
    for fault in faults:
        console.verdict("FAIL", fault)
    if not faults:
        console.verdict("PASS", "every mode learns")


COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "mode": "left",
    "steps": "right",
    "sync, median": "right",
    "weights beside vLLM's": "right",
    "trainer's peak": "right",
    "held-out reward": "right",
}
