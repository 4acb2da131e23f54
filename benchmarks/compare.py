"""The demo's task, model and seed in every mode, and a table of costs and results.

Each mode is one `bridge run` in its own process. The exit code is 1 if a mode does not learn or, on a CPU, if two modes
that compute the same numbers disagree (a GPU's order of summation depends on its load). Absolute times on a CPU mean
little.

    python -m benchmarks.compare --steps 60 --restarts 6
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import _results
from benchmarks._sides import BRIDGE
from bridge.checkpoints.run_directory import RunDirectory
from bridge.core.address import free_port
from bridge.processes import accelerator
from bridge_cli.demo import HOST, LEARNING_RATE, demo_model_folder

LORA = ("--mode", "lora_only", "--lora-r", "8", "--lora-alpha", "16", "--lr", "2e-3")
"""The demo's model is so small that its adapter needs a higher learning rate than its weights."""
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "shared_vllm": ("--mode", "shared_vllm", "--lr", str(LEARNING_RATE)),
    "none": ("--mode", "none", "--lr", str(LEARNING_RATE)),
    "lora_only, memory": (*LORA, "--lora-handover", "memory"),
    "lora_only, disk": (*LORA, "--lora-handover", "disk"),
}
"""Flags of each run, by the name of its row in the table."""
SAME_WAY = (("shared_vllm", "none"), ("lora_only, memory", "lora_only, disk"))
"""Pairs of modes that train the same parameters and publish them differently."""
TASK = ("--environment", "arithmetic", "--batch-size", "128", "--max-new-tokens", "4", "--eval-samples", "16")
LEAST_GAIN = 0.1
"""Minimum gain in held-out reward over a full run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Costs and results of one mode."""

    mode: str
    """Mode and way of publishing."""
    steps: int
    """Number of steps."""
    sync_ms: float
    """Time between an update and the first token after it, without the write: median over steps, in ms."""
    weight_bytes: int
    """Bytes of weights that the trainer holds besides the server's."""
    trainer_peak_gib: float
    """Peak memory of the trainer in GiB: of the GPU, or of the process on a CPU."""
    reward_before: float
    """Held-out reward before the first step."""
    reward_after: float
    """Held-out reward after the last step."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two runs with the same seed agree."""

    runs: tuple[str, str]
    """The two modes."""
    steps: int
    """Number of steps in both runs."""
    same_rollouts: int
    """Number of steps with identical sampled tokens."""
    same_rewards: int
    """Number of steps with identical mean reward."""
    reward_diff_max: float
    """Largest difference in mean reward of a step."""

    def in_words(self) -> str:
        return (
            f"{' | '.join(self.runs)}: the same rollouts in {self.same_rollouts} of {self.steps} steps,"
            f" the same reward in {self.same_rewards}, largest difference {self.reward_diff_max:.3f}"
        )


def row(mode: str, steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Row:
    """Return the row of one run from its metrics and summary."""
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
    """Yield the failures of a comparison in which `agreements` must be complete."""
    yield from (agreement.in_words() for agreement in agreements if agreement.same_rollouts < agreement.steps)
    for row in rows:
        if row.steps == steps and row.reward_after - row.reward_before < LEAST_GAIN:
            yield f"{row.mode} gained {row.reward_after - row.reward_before:.3f}, expected at least {LEAST_GAIN}"


def run(folder: Path, model: Path, flags: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train in a separate process; return its metrics and summary."""
    made = RunDirectory(folder)
    paths = ["--run-dir", str(folder), "--vllm-config-path", str(made.manifest), "--port", str(free_port(HOST))]
    share = ["--gpu-memory-utilization", "0.2"]  # enough for a one-megabyte model
    eager = [] if torch.cuda.is_available() else ["--", "--enforce-eager"]  # compiling takes longer than all steps
    command = [sys.executable, "-c", BRIDGE, "run", "--model", str(model), *TASK, *paths, *flags, *share, *eager]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = [json.loads(line) for line in made.metrics.read_text().splitlines()]
    return steps, json.loads(made.summary.read_text())


def table(rows: Sequence[Row]) -> str:
    titles = ["mode", "steps", "sync, median", "weights beside vLLM's", "trainer's peak", "held-out reward"]
    cells = [
        [
            row.mode,
            str(row.steps),
            f"{row.sync_ms:,.1f} ms",
            f"{row.weight_bytes / 2**20:.2f} MiB",
            f"{row.trainer_peak_gib:.2f} GiB",
            f"{row.reward_before:.3f} -> {row.reward_after:.3f}",
        ]
        for row in rows
    ]
    return _results.table([titles, *cells])


def main() -> None:
    """Train in every mode, write the results, print the table."""
    parser = _results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each mode")
    parser.add_argument("--restarts", type=int, default=6, help="steps of mode none, which restarts vLLM at each")
    parser.add_argument("--seed", type=int, default=0, help="seed of all runs")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where vLLM runs")
    options = parser.parse_args()
    model = demo_model_folder()
    documents = {}
    with TemporaryDirectory() as folder:
        for variant, flags in VARIANTS.items():
            count = options.restarts if variant == "none" else options.steps
            _results.say(f"{variant}: {count} steps")
            more = ["--training-steps", str(count), "--seed", str(options.seed), "--device", options.device]
            documents[variant] = run(Path(folder) / variant.replace(", ", "-"), model, [*flags, *more])
    rows = [row(variant, *results) for variant, results in documents.items()]
    agreements = [agree(pair, *(documents[variant][0] for variant in pair)) for pair in SAME_WAY]
    exactly = accelerator.choose(options.device)[0] == "cpu"
    faults = [*judge(rows, agreements if exactly else [], options.steps)]
    results = {"rows": [asdict(row) for row in rows], "agreements": [asdict(agreement) for agreement in agreements]}
    path = _results.write("compare", {**results, "faults": faults}, options.out)
    print(table(rows))
    for agreement in agreements:
        print(agreement.in_words())
    for fault in faults:
        print(f"FAIL  {fault}")
    _results.say(f"wrote {path}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
