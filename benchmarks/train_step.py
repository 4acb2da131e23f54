"""The trainer alone, without vLLM: passes, the optimizer and memory, with several settings.

    python -m benchmarks.train_step --sizes 7b --settings "" "optimizer=adamw-8bit" "compile_layers=false" --profile
    python -m benchmarks.train_step --sizes qwen3-0.6b --lengths 16384 65536 --attention flash cudnn --rounds 2
    python -m benchmarks.train_step --sizes qwen3-4b --lengths 65536 --settings "mode=lora_only lora_r=16"
    python -m benchmarks.train_step --sizes 7b --lengths 131072 --settings "optimizer=adamw-8bit" --ranks 2 --out two

The model has a Qwen2 or Qwen3 shape and random bf16 weights; the batch is made up: 64 completions of 256 tokens in
groups of 8 with prompts of 120 tokens, or with `--lengths` one sequence of that many tokens, all with advantages. A
setting is any choice of `bridge train`. The benchmark times what a training run does with a batch
(`bridge/run/learner.py`), from idle device to idle device, after the first steps, which compile. A setting that does
not fit into memory, or for which no time is left, becomes a row that says so. All rows so far are written after each
one. With `--ranks`, that many GPUs compute each pass together (`--context-parallel-size`) and share the optimizer;
memory figures are the first GPU's.

MFU and its operations are those of a run's metrics (`bridge/passes/flops.py`).

Not covered: generation, the fence, replicas on several GPUs (`grpo.py` has the whole step).
"""

import argparse
import gc
import logging
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import _results, _work
from benchmarks._models import SIZES, is_table, model_config, spread
from benchmarks._results import say
from benchmarks._sides import Work
from bridge.config import TrainConfig
from bridge.core import logs
from bridge.engine.make_trainable import prepared_of, trainable_of
from bridge.errors import BridgeError
from bridge.learn.policy_loss import LossSpec
from bridge.optimizers import factory
from bridge.passes.flops import peak_flops
from bridge.ranks.world import ALONE, LOOPBACK, Ranks
from bridge.run.learner import Learner
from bridge.types import Group
from bridge.weights.adapter import Adapter
from bridge.weights.attach import OpenedModel, leave_core_to_server

GIB = 2**30
SETTINGS = ("", "optimizer=adamw-8bit", "gradient_checkpointing=true", "compile_layers=false")
TOP = 25
"""Number of kernels listed in a profile."""
COLUMNS = {
    "step_s": "step s", "forward_backward_s": "forward, backward", "optimizer_s": "optimizer", "first_s": "first step",
    "tokens_per_s": "tokens/s", "mfu": "MFU", "peak_gib": "peak GiB", "beside_weights_gib": "beside weights",
}  # fmt: skip

Row = dict[str, Any]


class Case(NamedTuple):
    """The model, length and setting that one row measures."""

    size: str
    length: int | None
    """Tokens of the single sequence; None: a batch of completions."""
    setting: str

    @property
    def name(self) -> str:
        setting = self.setting or "defaults"
        return setting if self.length is None else f"{self.length:,}: {setting}"


def main() -> None:
    """Measure every size with every length and setting, on one rank or on several."""
    options = _flags().parse_args()
    if options.ranks == 1:
        measure_all(options, ALONE)
        return
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        start = multiprocessing.get_context("spawn").Process
        others = [start(target=as_rank, args=(rank, port, options), daemon=True) for rank in range(1, options.ranks)]
        for other in others:
            other.start()
        as_rank(0, port, options, listener)


def as_rank(rank: int, port: int, options: argparse.Namespace, listener: socket.socket | None = None) -> None:
    """Measure as one of several ranks, which rendezvous at `port`; the first one listens there."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = options.ranks
    ranks = Ranks.join(rank, size, cp_size=size, port=port, device=device, listener=listener)
    try:
        measure_all(options, ranks)
    finally:
        ranks.close()


def measure_all(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure all cases; the first rank writes all results so far after each case."""
    deadline = time.monotonic() + options.limit_s
    results: dict[str, list[Row]] = {}
    for case in cases(options):
        rows = results.setdefault(case.size, [])
        rows.append(measure(case, options, deadline, ranks))
        _let_go()
        if ranks.is_rank_zero:
            path = _results.write("train_step", results, options.out)
            say(f"{case.size}, in {path}\n{table(rows)}")
        if ranks.is_broken:
            return


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield all cases; within each round, cases that are compared run one after the other."""
    settings = [
        f"{setting} attention={kernel}".strip() if kernel else setting
        for setting in options.settings
        for kernel in options.attention or [None]
    ]
    for _ in range(options.rounds):
        for size in options.sizes:
            for length in options.lengths or [None]:
                yield from (Case(size, length, setting) for setting in settings)


def _flags() -> argparse.ArgumentParser:
    flags, work = _results.parser(__doc__), Work()
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.5b", "7b"])
    flags.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), type=_usable, metavar="FIELDS", help='"field=value ..."'
    )
    flags.add_argument("--lengths", nargs="+", type=int, help="tokens of the one sequence of a step")
    flags.add_argument("--attention", nargs="+", metavar="KERNEL", help="kernels, each with every setting")
    flags.add_argument("--ranks", type=int, default=1, help="GPUs that compute each pass together")
    flags.add_argument("--rounds", type=int, default=1, help="how often all rows are measured, round by round")
    flags.add_argument("--steps", type=int, default=4, help="measured steps")
    flags.add_argument("--warm-up", type=int, default=2, help="steps before them")
    flags.add_argument("--completions", type=int, default=work.completions, help="completions of a step")
    flags.add_argument("--group", type=int, default=work.group, help="completions of a prompt")
    flags.add_argument("--tokens", type=int, default=work.tokens, help="tokens of a completion")
    flags.add_argument("--profile", action="store_true", help=f"name the {TOP} most expensive kernels of a step")
    flags.add_argument("--limit-s", type=float, default=3600, help="seconds of everything; no step begins later")
    return flags


class _Lines(logging.Handler):
    """A handler that collects Bridge's log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def measure(case: Case, options: argparse.Namespace, deadline: float, ranks: Ranks = ALONE) -> Row:
    """Return the figures of one case, or the reason why there are none."""
    if ranks.is_rank_zero:
        say(f"{case.size}: {case.name}")
    log = _Lines()
    row: Row = {"name": case.name, "setting": case.setting, "length": case.length, "notes": log.lines}
    row |= {"ranks": ranks.world_size}
    try:
        with logs.handled_by(log):
            steps = Steps(case.size, config_of(case.setting), batch_of(case, options), ranks)
            return {**row, **steps.figures(options, deadline)}
    except (RuntimeError, BridgeError) as error:  # out of memory, or a kernel that failed
        return {**row, "failure": str(error).strip().partition("\n")[0]}


def batch_of(case: Case, options: argparse.Namespace) -> list[Group]:
    vocabulary = model_config(case.size).vocab_size
    if case.length is None:
        return _work.batch(vocabulary, options.completions, group=options.group, num_tokens=options.tokens)
    (group,) = _work.batch(vocabulary, 1, group=1, num_tokens=case.length - _work.PROMPT_TOKENS)
    return [group.with_advantages([1.0])]


def _let_go() -> None:
    """Free a setting's memory once no frame of `measure` is left, so that it does not affect the next measurement."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _usable(setting: str) -> str:
    """Check a setting's keys and return the setting (argparse reports the ValueError)."""
    config_of(setting)
    return setting


def config_of(setting: str) -> TrainConfig:
    """Return the configuration with the setting's choices."""
    fields = dict(word.split("=", 1) for word in setting.split())
    return TrainConfig.model_validate({"model_name": "made up", **fields})


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one step."""

    forward_backward_s: float
    """Time of packing, the passes, and the gradient's norm."""
    optimizer_s: float
    """Time of the update; with gradient release, it includes the passes."""

    @property
    def step_s(self) -> float:
        return self.forward_backward_s + self.optimizer_s


class Steps:
    """A model, everything that trains it, and a batch."""

    def __init__(self, size: str, config: TrainConfig, batch: Sequence[Group], ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._device = torch.device("cuda") if torch.cuda.is_available() else leave_core_to_server()
        model = build(size, self._device)
        self._weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        factors = {name: 1.0 for name, _ in model.named_parameters()}
        if config.mode == "lora_only":
            factors = Adapter(model, config.lora, seed=config.seed, base_name=size).lr_factors()
        opened = OpenedModel(model=model, device=self._device, lr_factors=factors, open_s=0, weight_bytes=0)
        prepared = prepared_of(config.compute, opened, ranks=ranks)
        trainable = trainable_of(
            opened, prepared,
            compute=config.compute, optimizer=config.optimizer, lr=config.learning_rate, loss=config.loss,
            sampling=config.sampling, num_groups=config.groups_per_batch, replicas=config.replicas,
            hosts=config.hosts, seed=config.seed, has_adapter=config.mode == "lora_only",
            model_name=config.model_name, ranks=ranks,
        )  # fmt: skip
        schedule = factory.schedule(config.optimizer, config.training_steps)
        self._learner = Learner(trainable, LossSpec.of(config.loss), schedule)
        self._batch = batch
        self._num_tokens = sum(
            len(group.prompt_token_ids) + len(completion.token_ids)
            for group in batch
            for completion in group.completions
        )

    def figures(self, options: argparse.Namespace, deadline: float) -> Row:
        """Take all steps, and return their figures."""
        first = self.step()
        flops = self._learner.learnt()["train_flops"]
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        count = max(0, options.warm_up - 1) + options.steps
        times = [self.step() for _ in range(count) if self._ranks.run_on_rank_zero(lambda: time.monotonic() < deadline)]
        measured = times[max(0, options.warm_up - 1) :]
        if not measured:
            return {"first_s": first.step_s, "failure": "no time was left"}
        names = ("step_s", "forward_backward_s", "optimizer_s")
        row: Row = {name: statistics.median(getattr(step, name) for step in measured) for name in names}
        row |= {"first_s": first.step_s, "num_steps": len(measured), "weights_gib": self._weight_bytes / GIB}
        row |= {"tokens": self._num_tokens, "tokens_per_s": self._num_tokens / row["step_s"], "train_flops": flops}
        if self._device.type == "cuda":
            row["mfu"] = flops / row["step_s"] / peak_flops(self._device) / self._ranks.world_size
            row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            row["beside_weights_gib"] = row["peak_gib"] - row["weights_gib"]
        return {**row, "kernels": self.kernels()} if options.profile else row

    def step(self) -> Times:
        begin = self._idle()
        self._learner.take(self._batch)
        self._learner.prepare()
        between = self._idle()
        self._learner.write()
        return Times(forward_backward_s=between - begin, optimizer_s=self._idle() - between)

    def kernels(self) -> list[Row]:
        """Profile one step; return the kernels with the most device time."""
        on_gpu = self._device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            self.step()
        kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        averages = profiler.key_averages()
        say(averages.table(sort_by=kind, row_limit=TOP, max_name_column_width=80))
        taken = sorted(averages, key=lambda event: float(getattr(event, kind)), reverse=True)[:TOP]
        return [{"name": kernel.key, "calls": kernel.count, "ms": getattr(kernel, kind) / 1e3} for kernel in taken]

    def _idle(self) -> float:
        """Return the time once the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def build(size: str, device: torch.device) -> PreTrainedModel:
    """Return a model with random bf16 weights on `device`, in evaluation mode, like an attached one."""
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config(size), dtype=torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in (parameters := dict(model.named_parameters())).items():
            spread(parameter, generator, is_table=is_table(name, parameters))
    return model.eval()


def table(rows: Sequence[Row]) -> str:
    cells = [["", *COLUMNS.values()]]
    cells += [[row["name"], *(f"{row[name]:,.3f}" if name in row else "-" for name in COLUMNS)] for row in rows]
    notes = [f"{row['name']}: {line}" for row in rows for line in row["notes"]]
    faults = [f"{row['name']}: {row['failure']}" for row in rows if "failure" in row]
    return "\n".join([_results.table(cells), *notes, *faults])


if __name__ == "__main__":
    main()
