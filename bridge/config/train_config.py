"""All choices of one training run, and which of them fit together."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from bridge.config import combinations
from bridge.config.choices import Config, flag, flattened
from bridge.config.declaration import declare
from bridge.config.rollouts import EVALUATION, RolloutConfig, SamplingConfig, TaskConfig
from bridge.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    EvaluationConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PublishingConfig,
    ServerConfig,
    TrackingConfig,
)
from bridge.errors import UsageError

FULL_RATE, ADAPTER_RATE = 1e-6, 1e-5
"""Default learning rates. 1e-6 is TRL's for GRPO; an adapter needs about ten times the rate of all weights.

Source: `GRPOConfig` of TRL 1.16; "LoRA Without Regret", Schulman et al. 2025.
"""
SEVERAL = "Several GPUs and hosts"


class TrainConfig(Config):
    """One training run."""

    model_name: str = declare(synonyms=("model",), borrowed=("model_name_or_path",), identifies=True, is_path=True)
    """Model to train: the folder or hub name that the server serves."""
    mode: Literal["shared_vllm", "lora_only", "none"] = declare(
        "shared_vllm", synonyms=("weight_bridge_mode",), identifies=True
    )
    """How new weights reach vLLM: shared memory, an adapter, or a checkpoint and a restart."""
    training_steps: int = declare(
        10, ge=1, position=1, borrowed=("max_steps", "total_training_steps"), counts_updates="max_steps"
    )
    """Steps to train: one batch and one published version each."""
    gpus: int = declare(1, ge=1, panel=SEVERAL)
    """GPUs of this host to train on, with a replica of the model and a server on each GPU, or on each group of
    --tensor-parallel-size GPUs; on a CPU, the number of servers."""
    context_parallel_size: int = declare(1, ge=1, panel=SEVERAL)
    """Replicas that compute each training pass together, for long sequences: each has a slice of the tokens. The
    number of replicas (--gpus or --servers) must be a multiple of it."""
    hosts: int = declare(1, ge=1, panel=SEVERAL)
    """Hosts to train on, with --gpus on each; the same command is started on every one of them."""
    rendezvous: str | None = declare(None, panel=SEVERAL)
    """Where the hosts meet, HOST:PORT: an address of one of them, which runs the first rank, and a free port there."""
    restarts: int = declare(0, ge=0, panel=SEVERAL)
    """When a rank or a host is lost, resume from the newest checkpoint up to this many times; the remaining hosts wait
    until the lost one is restarted."""
    stop_at: str | None = declare(None, panel=EVALUATION, position=-1)
    """End the run early, once a metric of a step or an evaluation meets a condition: `eval_reward_mean>=0.9`,
    `kl>=0.5`."""
    seed: int = declare(0, ge=0, panel=SamplingConfig.panel, position=1)
    """Seed for the order of the problems and for sampling."""
    resume: bool = declare(False, panel=EVALUATION, position=3)
    """Resume from the newest complete checkpoint in --save-path or --run-dir, or of the latest run in runs/ with this
    model and task; start from step 1 if there is none."""
    run_dir: Path | None = declare(None, panel=EVALUATION, position=3)
    """Run directory (default: a new one in runs/)."""
    trainer_device: str = declare(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        panel=PublishingConfig.panel,
        position=1,
        only=("mode", ("lora_only", "none")),
    )
    """Device for the trainer's own weights: `cpu`, `cuda`, `cuda:1`; `auto` uses a GPU if there is one."""
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    lora: LoraConfig = LoraConfig()
    publishing: PublishingConfig = PublishingConfig()
    server: ServerConfig = ServerConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def replicas(self) -> int:
        """Return how many copies of the model are trained in lockstep, on all hosts."""
        return self.gpus * self.hosts

    @property
    def completions_per_replica(self) -> int:
        """Return how many completions of a batch each replica's server samples."""
        return self.rollouts.batch_size // self.replicas

    @property
    def completions_per_group(self) -> int:
        """Return how many completions of a prompt a step trains on: those of a row, or --group-size sampled ones."""
        return {"sft": 1, "dpo": 2}.get(self.loss.name, self.sampling.group_size)

    @property
    def groups_per_batch(self) -> int:
        """Return how many groups a step trains on; a step of the warm-up trains on --batch-size rows instead."""
        return self.rollouts.batch_size // self.completions_per_group

    @property
    def num_row_steps(self) -> int:
        """Return how many steps, the first ones, train on the rows of a file: all, those of a warm-up, or none."""
        return self.training_steps if self.loss.takes_rows else self.rollouts.warm_up_steps

    @property
    def rows_key(self) -> str:
        """Return the key of the choice that names the rows to train on; empty if the run samples everything."""
        if self.loss.takes_rows:
            return "data"
        return "warm_up_data" if self.rollouts.warm_up_steps else ""

    @property
    def samples_problems(self) -> bool:
        """Return whether the run samples an environment's problems, be it only the held-out ones for an evaluation."""
        return self.rollouts.samples_here and (not self.loss.takes_rows or self.evaluation.samples > 0)

    @property
    def way(self) -> tuple[str, str]:
        """Return how new weights reach vLLM: --mode, and its --lora-handover or --reload if it has one."""
        return self.mode, {"lora_only": self.lora.handover, "none": self.publishing.reload}.get(self.mode, "")

    @property
    def trains_in_server(self) -> bool:
        """Return whether the trained weights lie in the server's memory, sharded as the server's weights are."""
        return self.mode == "shared_vllm" or (self.mode == "lora_only" and self.lora.handover == "memory")

    @property
    def adapts_experts(self) -> bool:
        """Return whether the adapter of mode `lora_only` also adapts routed experts."""
        return self.mode == "lora_only" and self.lora.has_experts

    @property
    def needs_patched_server(self) -> bool:
        """Return whether the server must be patched; a server that is only restarted can be a stock vLLM."""
        return self.mode != "none" or self.publishing.reload == "in-place"

    @property
    def learning_rate(self) -> float:
        """Return the chosen learning rate, or the default for an adapter or for all weights."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return ADAPTER_RATE if self.mode == "lora_only" else FULL_RATE

    def settled(self) -> Self:
        """Return these choices, with the defaults that depend on other choices filled in."""
        return self.changed(lr=self.learning_rate, max_new_tokens=self.sampling.longest)

    def flat(self) -> dict[str, Any]:
        """Return all choices by key as JSON values, with the defaults that depend on other choices filled in."""
        return flattened(type(self), self.settled().model_dump(mode="json"))

    def tp_size(self, server_gpus: int) -> int:
        """Return the number of ranks that train on one server: one per GPU if they train in its memory, otherwise one.

        Raises:
            UsageError: the trained weights cannot be sharded.
        """
        combinations.refuse(self, tensor_parallel_size=server_gpus)
        return server_gpus if self.trains_in_server else 1

    def dp_size(self, tp_size: int) -> int:
        """Return the number of replicas on each host, of `tp_size` GPUs each.

        Raises:
            UsageError: `--gpus` is not a multiple of `tp_size`, or the replicas do not divide into context-parallel
                groups, or a batch does not divide evenly among them.
        """
        if self.gpus % tp_size and self.gpus > 1:
            raise UsageError(
                f"--gpus {self.gpus} is not a multiple of --tensor-parallel-size {tp_size}",
                hint=f"--gpus {max(1, self.gpus // tp_size) * tp_size}",
            )
        count = max(1, self.gpus // tp_size)  # --gpus 1 is the default
        if count % self.context_parallel_size:
            raise UsageError(
                f"--context-parallel-size {self.context_parallel_size} does not divide the {count} replicas of a host",
                hint=f"use a multiple of {self.context_parallel_size} as --gpus, or as many --servers for bridge train",
            )
        group_size = self.sampling.group_size
        size = count * self.hosts
        num_groups = self.rollouts.batch_size // group_size
        if self.rollouts.samples_here and not self.loss.takes_rows and num_groups % size:
            least = math.lcm(size, self.optimizer.updates_per_batch)
            raise UsageError(
                f"{size} replicas do not divide the {num_groups} groups of a batch",
                hint=f"--batch-size {group_size * least * -(-num_groups // least)}",
            )
        return count

    def misread(self, names: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        updates = self.optimizer.updates_per_step
        bound = self.loss.clip_high
        for key, choice in self.choices().items():
            if choice.counts_updates and choice.counts_updates == names.get(key) and updates > 1:
                reason = f"TRL counts optimizer steps, {flag(key)} counts batches of {updates} optimizer steps"
                yield key, reason, f"{flag(key)} {math.ceil(self.get(key) / updates)}"
        if names.get("clip_high") == "epsilon_high" and self.loss.name == "cispo" and bound is not None:
            yield (
                "clip_high",
                f"with cispo TRL clips the weight at {bound:g}, --clip-high {bound:g} would clip it at {1 + bound:g}",
                f"--clip-high {bound - 1:g}" if bound > 1 else "--clip-high is the bound minus 1",
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_that_choices_have_an_effect()
        self._check_batch()
        combinations.refuse(self)
        return self

    def _check_that_choices_have_an_effect(self) -> None:
        """Refuse a choice that has no effect without another one."""
        for key, choice in self.choices().items():
            if choice.only is None or self.get(key) == self.default(key):
                continue
            switch, values = choice.only
            if self.get(switch) not in values:
                raise UsageError(
                    f"{flag(key)} has no effect with {flag(switch)} {self.get(switch)}, only with"
                    f" {' and '.join(values)}",
                    hint=f"{flag(switch)} {' or '.join(values)}, or leave {flag(key)} out",
                )
        loss = self.loss
        if loss.kl_in_reward and not loss.kl_coef:
            raise UsageError(
                "--kl-in-reward has no effect: --kl-coef, its weight, is 0", hint="--kl-coef 0.01, or leave it out"
            )
        if loss.reference_model is not None and not loss.needs_reference:
            raise UsageError(
                "--reference-model would not be used: --kl-coef is 0", hint="--kl-coef 0.01, or leave it out"
            )
        rollouts = self.rollouts
        if (rollouts.warm_up_data is None) != (rollouts.warm_up_steps == 0):
            lacking = "--warm-up-steps" if rollouts.warm_up_data is not None else "--warm-up-data"
            raise UsageError(
                f"{lacking} is missing: a warm-up needs a file and a number of steps",
                hint="--warm-up-data path/to/rows.jsonl --warm-up-steps 50",
            )
        if rollouts.warm_up_steps >= self.training_steps:
            raise UsageError(
                f"--warm-up-steps {rollouts.warm_up_steps} must be less than --training-steps {self.training_steps},"
                " which includes the warm-up",
                hint=f"--training-steps {rollouts.warm_up_steps + 10}, or --loss sft for a run on rows only",
            )
        if loss.takes_rows and self.evaluation.samples and not self.was_given("environment"):
            raise UsageError(
                f"--eval-samples {self.evaluation.samples} needs an environment with held-out problems, since --loss"
                f" {loss.name} trains on rows",
                hint="--environment gsm8k, or leave --eval-samples out",
            )
        loss.check_teacher()
        for key in ("eval_interval", "eval_temperature", "eval_pass_reward"):
            if not self.evaluation.samples and self.get(key) != self.default(key):
                raise UsageError(
                    f"{flag(key)} {self.get(key):g} has no effect without --eval-samples, the number of completions per"
                    " held-out problem",
                    hint="--eval-samples 1, or leave it out",
                )
        if (self.stop_at or "").startswith("eval_") and not self.evaluation.interval:
            raise UsageError(
                f"--stop-at {self.stop_at} has no effect without --eval-interval: nothing is evaluated before the end",
                hint="add --eval-interval N, or give --stop-at a training metric",
            )

    def _check_batch(self) -> None:
        """Check that a batch divides into groups and mini-batches, and that the choices that depend on its size fit."""
        batch_size = self.rollouts.batch_size
        group_size = self.completions_per_group
        if batch_size % group_size and self.loss.name == "dpo":
            raise UsageError(
                f"--batch-size {batch_size} is odd, but --loss dpo trains on pairs, and each counts as two completions",
                hint=f"--batch-size {batch_size + 1}",
            )
        if batch_size % group_size:
            raise UsageError(
                f"--batch-size {batch_size} is not a multiple of --group-size {group_size}",
                hint=f"--batch-size {math.ceil(batch_size / group_size) * group_size}",
            )
        num_groups = batch_size // group_size
        updates = self.optimizer.updates_per_batch
        if num_groups % updates:
            raise UsageError(
                f"--updates-per-batch {updates} does not divide the {num_groups} groups of a batch",
                hint=f"--batch-size {math.ceil(num_groups / updates) * updates * group_size}, or fewer updates",
            )
        groups_in_flight = self.rollouts.groups_in_flight
        max_staleness = self.rollouts.max_staleness
        most = num_groups * (max_staleness + 1)
        if groups_in_flight is not None and not num_groups <= groups_in_flight <= most:
            raise UsageError(
                f"--groups-in-flight {groups_in_flight} must be at least the {num_groups} groups of a batch, and at"
                f" most {most}: more could not be trained on within --max-staleness {max_staleness}",
                hint="leave it out: it is derived",
            )
        overlong_buffer = self.rollouts.overlong_buffer
        if overlong_buffer > self.sampling.longest:
            raise UsageError(
                f"--overlong-buffer {overlong_buffer} is longer than the longest completion,"
                f" {self.sampling.longest} tokens (--max-new-tokens)",
                hint=f"--overlong-buffer {self.sampling.longest} or less",
            )
        warmup_steps = self.optimizer.warmup_steps
        if warmup_steps >= self.training_steps:
            raise UsageError(
                f"--warmup-steps {warmup_steps} must be less than --training-steps {self.training_steps}: the learning"
                " rate would never reach --lr",
                hint=f"--training-steps {warmup_steps + 1} or more, or a shorter warmup",
            )
