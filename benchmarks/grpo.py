r"""GRPO: Bridge against TRL, back to back on the same work and model folder.

    python -m benchmarks.grpo --sizes 1.5b 7b --steps 8
    python -m benchmarks.grpo --sizes 7b --trl 16 "8 --no-checkpointing" "16 --liger" --ours adamw adamw-8bit
    python -m benchmarks.grpo --sizes 7b --lengths lognormal:600:0.6:4096 --trl 4 --ours "adamw-4bit" \
        "adamw-4bit --max-staleness 8 --groups-in-flight 32 -- --max-num-seqs 256"
    python -m benchmarks.grpo --sizes 32b --dummy-weights --trl --share 0.6 --completions 32 --steps 3 --warm-up 1 \
        --ours "adamw-4bit --gradient-release --updates-per-batch 2 --kv-sleep always --no-compile-layers"
    python -m benchmarks.grpo --sizes qwen3-30b-a3b --dummy-weights --trl --share 0 --steps 20 --warm-up 1 \
        --ours "adamw --mode lora_only" "adamw --mode lora_only --no-router-replay"
    python -m benchmarks.grpo --sizes qwen3-30b-a3b --dummy-weights --trl --share 0.35 \
        --ours "adamw-4bit --tensor-parallel-size 2 --gradient-checkpointing"
    python -m benchmarks.grpo --sizes 7b --trl "16" "16 --gpus 2" --ours adamw-8bit "adamw-8bit --gpus 2" \
        "adamw-8bit --tensor-parallel-size 2"
    python -m benchmarks.grpo --sizes 7b --ours "adamw-8bit --micro-batch-tokens 2176" \
        --trl "8 --no-checkpointing --optim adamw_bnb_8bit --sleep --attention flash --compile layers --liger"
    python -m benchmarks.grpo --sizes 7b --trl "16 --async" "16 --server --optim adamw_bnb_8bit" \
        --ours "adamw-8bit --mode none --reload transfer --trainer-device cuda:1 --max-staleness 1"

A step is 64 completions of exactly 256 tokens in groups of 8 with prompts of 120 tokens, and one AdamW update of bf16
weights with a token-mean loss, clipped gradients and truncated importance weights. The model has random weights and an
end token that cannot be sampled. Each side runs in its own processes, alone on the GPU; an outside clock stamps the
end of every step, and NVML reports the memory of the whole GPU. Warm-up steps are excluded. The difference: TRL's
AdamW keeps bf16 moments, or 8-bit ones with `--trl "16 --optim adamw_bnb_8bit"`, and rounds every update to bf16;
Bridge loses no update, and `--ours` selects the moments. All prompts have one length, so TRL pads nothing. With
`--trl "16 --on-bridge"` TRL's trainer works on Bridge's one copy of the weights (`bridge.for_trl`), without importance
weights: the same as "16 --no-correction".

With `--lengths`, completion lengths have a long tail: each completion of a prompt has its own cap, the same on both
sides, which use the prompts in the same order. Steps then differ, and figures are means instead of medians. TRL pads a
full step to its longest completion, so its steps take several times as long; `--trl-steps` limits them. With staleness,
`generate` is the time that the trainer waited for completions. Use more warm-up steps than `--max-staleness`, since the
first step waits for its longest completion, and the following ones find theirs finished.

TRL's fast settings are flags of a variant: `--sleep` (vLLM drops its weights and KV cache during training),
`--attention flash` (FlashAttention 2 by torch's kernel, which Bridge uses as well), `--compile layers` or `model`
(`torch_compile`) and `--liger`. The fastest combination depends on the shapes: give several, and Bridge is compared
with the best one.

Memory is the device's peak above its level before the run, without the KV cache, which either engine sizes by its
share; the next column is the prediction of `bridge plan`. For a side whose KV cache sleeps (`--sleep`, or Bridge's
`--kv-sleep always`) only the full peak is shown, since it may be from a time without the cache. Bridge uses free memory
for activations unless a variant limits it. A run that fails, or for which no time is left, becomes a row that says so.

Rows of Bridge also have, as means over the steps: trained tokens per second and GPU in only the passes and the update,
their MFU (counting only the experts that a token is routed to), the k3 KL divergence between vLLM and the trainer, and
for a mixture of experts with router replay, the share of choices that the trainer would have made differently.
`--dummy-weights` are vLLM's, refilled by `_dummy_weights.py` so that experts are chosen by their scores.

`to step 1` and `to warm` are the seconds from the command to the end of the first and of the last warm-up step, which
show startup and compilation; the file has the end of every step.

With `--gpus N` in a variant, a step has N times as many completions: N TRL processes started by torchrun, or N Bridge
servers (fewer with `--tensor-parallel-size T`). `scaling` is the gain in tokens/s over the same variant without these
flags, if that is also measured; `speed` compares with TRL on the same number of GPUs; memory is the first GPU's. With
`--async` (TRL's AsyncGRPO), `--server` (TRL's server mode) and `--trainer-device cuda:1` (Bridge), one GPU generates
and the other one trains.

Not covered: several hosts; learning (rewards are a hash); training alone (`train_step.py`).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import _dummy_weights, _figures, _gpu_memory, _results, _sides, _stamped
from benchmarks._lengths import Lognormal
from benchmarks._models import DUMMY, SIZES, weight_bytes
from benchmarks._results import say
from benchmarks._sides import Side, Work
from benchmarks._stamped import Run
from bridge.checkpoints.run_directory import RunDirectory
from bridge.checks import software

GIB = 2**30
OURS = (
    "adamw-8bit --micro-batch-tokens 2176",
    "adamw-8bit --micro-batch-tokens 2176 --gradient-checkpointing",
    "adamw-4bit --micro-batch-tokens 8704 --gradient-checkpointing",
)
"""One group per micro-batch with kept activations; recomputed activations, to fit 7B; and four groups per micro-batch,
which keep a GPU busy at 1.5B."""
LEAST_S = 30.0
"""No run starts if less time than this is left."""


def main() -> None:
    """Measure every size; write all results so far after every run."""
    flags = _flags()
    options = flags.parse_args()
    if options.lengths:
        try:
            options.tokens = Lognormal.parse(options.lengths).cap
        except ValueError as error:
            flags.error(f"--lengths {error}")
    if options.dummy_weights and options.trl:
        flags.error("--dummy-weights are vLLM's alone, and TRL reads files: give an empty --trl")
    bench = Bench(options, deadline=time.monotonic() + options.limit_s)
    for size in options.sizes:
        bench.measure(size)
    if options.json:
        print(json.dumps(_results.document("grpo", bench.results)))


def _flags() -> argparse.ArgumentParser:
    flags, work = _results.parser(__doc__), Work()
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.5b", "7b"])
    flags.add_argument("--steps", type=_results.count, default=8, help="measured steps of a run")
    flags.add_argument("--warm-up", type=int, default=2, help="steps before them, which compile")
    flags.add_argument("--trl-steps", type=_results.count, help="measured steps of TRL's runs (default: --steps)")
    flags.add_argument("--trl-warm-up", type=int, help="warm-up steps of TRL's runs (default: --warm-up)")
    flags.add_argument("--rounds", type=_results.count, default=1, help="runs of each side, alternating")
    flags.add_argument(
        "--trl", nargs="*", default=["16"], metavar="BATCH", help='"BATCH [flags of benchmarks._trl]", each a run'
    )
    flags.add_argument(
        "--ours", nargs="*", default=list(OURS), metavar="OPTIMIZER", help='"OPTIMIZER [flags of bridge run]"'
    )
    flags.add_argument("--models", type=Path, help="folder for the models, which stay there for the next time")
    flags.add_argument("--dummy-weights", action="store_true", help="vLLM's own, of no file; goes without --trl's runs")
    flags.add_argument(
        "--completions", type=_results.count, default=work.completions, help="completions of a step, on each GPU"
    )
    flags.add_argument("--group", type=_results.count, default=work.group, help="completions of a prompt")
    flags.add_argument("--tokens", type=_results.count, default=work.tokens, help="tokens of a completion")
    flags.add_argument(
        "--lengths", metavar="lognormal:MEDIAN:SIGMA:CAP", help="lengths in tokens, in place of --tokens"
    )
    flags.add_argument("--share", type=float, default=work.share, help="share of the GPU for vLLM; 0: Bridge chooses")
    flags.add_argument("--run-limit-s", type=float, default=600, help="seconds of one run, its start included")
    flags.add_argument("--limit-s", type=float, default=3600, help="seconds of everything")
    flags.add_argument("--keep-logs", type=Path, help="folder for the logs of every run")
    flags.add_argument("--json", action="store_true", help="print the figures on stdout as well")
    return flags


@dataclass
class Bench:
    """Options and results so far."""

    options: argparse.Namespace
    deadline: float
    results: dict[str, Any] = field(default_factory=dict)
    used_bytes: Callable[[], int] | None = field(default_factory=_gpu_memory.reader)

    def measure(self, size: str) -> None:
        """Run all sides on one model, one after the other."""
        with TemporaryDirectory(prefix="bridge-bench-") as scratch:
            model = Path(self.options.models or scratch, f"{size}-{DUMMY}" if self.options.dummy_weights else size)
            if not model.exists():
                say(f"{size}: writing the model")
                made_up = [DUMMY] if self.options.dummy_weights else []
                subprocess.run([sys.executable, "-m", "benchmarks._models", size, str(model), *made_up], check=True)
            weights_gib = weight_bytes(model) / GIB
            runs: dict[Side, list[Run]] = {}
            for number, side in enumerate(self._turns()):
                folder = Path(scratch, str(number))
                folder.mkdir()
                say(f"{size}: {side.name} {side.variant}")
                try:
                    run = self._run(side, model, folder)
                finally:
                    self._keep_logs(folder, f"{size}-{number}-{side.name}")
                runs.setdefault(side, []).append(run)
                self._tell(size, model, runs, weights_gib)

    def _turns(self) -> Iterator[Side]:
        engine = ("--load-format", DUMMY) if self.options.dummy_weights else ()
        sides = [Side("trl", variant) for variant in self.options.trl]
        sides += [Side("bridge", variant, engine) for variant in self.options.ours]
        for number in range(self.options.rounds):
            yield from reversed(sides) if number % 2 else sides

    def _run(self, side: Side, model: Path, folder: Path) -> Run:
        limit_s = min(self.options.run_limit_s, self.deadline - time.monotonic())
        if limit_s < LEAST_S:
            return Run(failure="no time was left")
        if side.name == "trl" and not software.installed_version("trl"):
            return Run(failure="TRL is not installed: pip install trl==1.16.0")
        steps = self._warm_up(side) + self._steps(side)
        argv, log = side.argv(self._work(), model, folder, steps), folder / "log"
        environment = side.environment(self._work(), folder)
        if self.options.dummy_weights:
            environment = _dummy_weights.installed(folder / "plugin", environment)
        run = _stamped.run(argv, environment, log, num_lines=steps, limit_s=limit_s, used_bytes=self.used_bytes)
        if self.used_bytes is not None:
            _gpu_memory.settle(self.used_bytes, run.baseline_bytes + GIB, limit_s=30)
        return replace(run, kv_cache_gib=side.kv_cache_gib(log, folder))

    def _steps(self, side: Side) -> int:
        return int((side.name == "trl" and self.options.trl_steps) or self.options.steps)

    def _warm_up(self, side: Side) -> int:
        is_given = side.name == "trl" and self.options.trl_warm_up is not None
        return int(self.options.trl_warm_up if is_given else self.options.warm_up)

    def _work(self) -> Work:
        return Work(**{name: getattr(self.options, name) for name in asdict(Work())})

    def _keep_logs(self, folder: Path, name: str) -> None:
        logs = {"": folder / "log", "-server": RunDirectory(folder / "run").server_log}
        logs |= {f"-{log.stem}": log for log in folder.glob("nccl.*.log")}
        if (kept := self.options.keep_logs) is not None:
            kept.mkdir(parents=True, exist_ok=True)
            for suffix, log in logs.items():
                if log.exists():
                    copyfile(log, kept / f"{name}{suffix}.log")

    def _tell(self, size: str, model: Path, runs: Mapping[Side, Sequence[Run]], weights_gib: float) -> None:
        differ = bool(self.options.lengths)
        measured = {
            side: {
                **_figures.row(side, of_side, warm_up=self._warm_up(side), differ=differ),
                "planned_gib": _sides.planned_gib(side, self._work(), model),
            }
            for side, of_side in runs.items()
        }
        rows = _figures.compare(_figures.scale(measured), weights_gib=weights_gib)
        self.results[size] = {"work": asdict(self._work()), "weights_gib": weights_gib, "rows": rows}
        path = _results.write("grpo", self.results, self.options.out)
        lines = [f"{size}, weights {weights_gib:.1f} GiB, in {path}", _figures.table(rows)]
        say("\n".join([*lines, *_figures.verdicts(rows, weights_gib=weights_gib)]))


if __name__ == "__main__":
    main()
