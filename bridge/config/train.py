"""All choices of one training run, and which of them fit together."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from bridge.config.choices import Config, flag, flattened
from bridge.config.declaration import declare
from bridge.config.optimizers import OPTIMIZERS
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
    """GPUs of this host to train on, with a replica of the model and a server on each, or on each
    --tensor-parallel-size of them; on a CPU, servers."""
    context_parallel_size: int = declare(1, ge=1, panel=SEVERAL)
    """Replicas that compute each training pass together, for long sequences: each has a slice of its tokens. --gpus is
    a multiple of it."""
    hosts: int = declare(1, ge=1, panel=SEVERAL)
    """Hosts to train on, with --gpus on each; the same command is started on every one of them."""
    rendezvous: str | None = declare(None, panel=SEVERAL)
    """Where the hosts meet, HOST:PORT: an address of one of them, which runs the first rank, and a free port there."""
    restarts: int = declare(0, ge=0, panel=SEVERAL)
    """When a rank or a host is lost, resume from the newest checkpoint up to this many times; the remaining hosts wait
    for the lost one to be started again."""
    stop_at: str | None = declare(None, panel=EVALUATION, position=-1)
    """End the run early, after a step or an evaluation with such a metric: `eval_reward_mean>=0.9`, `kl>=0.5`."""
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
    def way(self) -> tuple[str, str]:
        """Return how new weights reach vLLM: --mode, and its --lora-handover or --reload if it has one."""
        return self.mode, {"lora_only": self.lora.handover, "none": self.publishing.reload}.get(self.mode, "")

    @property
    def trains_in_server(self) -> bool:
        """Return whether what is trained lies in the server's memory, in as many parts as its weights."""
        return self.mode == "shared_vllm" or (self.mode == "lora_only" and self.lora.handover == "memory")

    @property
    def needs_patched_server(self) -> bool:
        """Return whether the server shares its weights; one that is only restarted can be the stock vLLM."""
        return self.mode != "none" or self.publishing.reload == "in-place"

    @property
    def learning_rate(self) -> float:
        """Return the chosen learning rate, or the default of what is trained."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return ADAPTER_RATE if self.mode == "lora_only" else FULL_RATE

    def settled(self) -> Self:
        """Return these choices with the defaults that depend on others."""
        return self.changed(lr=self.learning_rate, max_new_tokens=self.sampling.longest)

    def flat(self) -> dict[str, Any]:
        """Return all choices by key, as JSON holds them, those that depend on others included."""
        return flattened(type(self), self.settled().model_dump(mode="json"))

    def on_one_gpu(self) -> dict[str, bool]:
        """Return what trains on one GPU alone, and whether it was chosen."""
        return {
            f"--trainer-device {self.trainer_device}": self.trainer_device.partition(":")[2] not in ("", "0"),
            "--offload-optimizer with --gradient-release": self.optimizer.offload and self.optimizer.gradient_release,
        }

    def tp_size(self, server_gpus: int) -> int:
        """Return the number of ranks that train on one server: one per GPU of it, if its memory is trained.

        Raises:
            UsageError: what is trained cannot be cut into parts.
        """
        if server_gpus == 1:
            return 1
        parts, slices = f"--tensor-parallel-size {server_gpus}", self.context_parallel_size
        if slices > 1:
            raise UsageError(
                f"--context-parallel-size {slices} trains on servers of one GPU each, found {parts}",
                hint="leave out one of them",
            )
        if not self.trains_in_server:
            if self.replicas > 1:
                raise UsageError(
                    f"--mode {self.mode}: each of several servers has one GPU, found {parts}", hint="leave it out"
                )
            return 1
        if alone := next((name for name, is_chosen in self.on_one_gpu().items() if is_chosen), None):
            raise UsageError(f"{alone} trains on one GPU, found {parts}", hint=f"leave out {alone} or {parts}")
        if self.optimizer.gradient_release:
            raise UsageError(
                f"--gradient-release trains on servers of one GPU each, found {parts}",
                hint=f"leave out --gradient-release or {parts}",
            )
        return server_gpus

    def dp_size(self, tp_size: int) -> int:
        """Return the number of replicas on each host, of `tp_size` GPUs each.

        Raises:
            UsageError: their GPUs are not those of `--gpus`, or they do not divide a batch, or into groups that compute
                passes together.
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
                hint=f"a multiple of {self.context_parallel_size}: --gpus, or --servers of bridge train",
            )
        group_size, size = self.sampling.group_size, count * self.hosts
        num_groups = self.rollouts.batch_size // group_size
        if self.rollouts.samples_here and num_groups % size:
            least = math.lcm(size, self.optimizer.updates_per_batch)
            raise UsageError(
                f"{size} replicas do not divide the {num_groups} groups of a batch",
                hint=f"--batch-size {group_size * least * -(-num_groups // least)}",
            )
        return count

    def misread(self, names: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        updates, bound = self.optimizer.updates_per_step, self.loss.clip_high
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
    def _fits_together(self) -> Self:
        for key, choice in self.choices().items():
            switch, values = choice.only or (key, ())
            if choice.only and self.get(switch) not in values and self.get(key) != self.default(key):
                raise UsageError(
                    f"{flag(key)} has no effect with {flag(switch)} {self.get(switch)}, only with"
                    f" {' and '.join(values)}",
                    hint=f"{flag(switch)} {' or '.join(values)}, or leave {flag(key)} out",
                )
        for rules in (
            self._rules_of_batches, self._rules_of_gpus, self._rules_of_publishing, self._rules_of_a_reference,
            self._rules_of_updates, self._rules_of_evaluations, self.lora.rules,
        ):  # fmt: skip
            for fault, is_broken in rules().items():
                if is_broken:
                    raise ValueError(fault)
        return self

    def _rules_of_batches(self) -> dict[str, bool]:
        """Return faults, and whether these choices have them; the same for the other rules."""
        batch_size, group_size, buffer = (
            self.rollouts.batch_size,
            self.sampling.group_size,
            self.rollouts.overlong_buffer,
        )
        num_groups, at_once = batch_size // group_size, self.rollouts.groups_in_flight
        most = num_groups * (self.rollouts.max_staleness + 1)
        return {
            f"--overlong-buffer {buffer} is longer than the longest completion, {self.sampling.longest} tokens"
            " (--max-new-tokens)": buffer > self.sampling.longest,
            f"--groups-in-flight {at_once} must be at least the {num_groups} groups of a batch, and at most {most}:"
            f" more could not be trained on within --max-staleness {self.rollouts.max_staleness}": at_once is not None
            and not num_groups <= at_once <= most,
        }

    def _rules_of_gpus(self) -> dict[str, bool]:
        given = f"--gpus {self.gpus}" + (f" on each of --hosts {self.hosts}" if self.hosts > 1 else "")
        return {
            f"{name} trains on one GPU, found {given}": is_chosen and self.replicas > 1
            for name, is_chosen in self.on_one_gpu().items()
        } | {
            f"--gradient-release cannot be combined with --context-parallel-size {self.context_parallel_size}; leave"
            " out one of them": self.optimizer.gradient_release and self.context_parallel_size > 1
        }

    def _rules_of_publishing(self) -> dict[str, bool]:
        return {
            "--router-replay needs --rollouts environment, and no --lora-handover disk: nothing else reports experts": (
                self.compute.router_replay is True and not (self.rollouts.samples_here and self.trains_in_server)
            ),
            "--kv-sleep always: with --lora-handover disk the server generates while the adapter is trained": (
                self.publishing.kv_sleep == "always" and self.mode == "lora_only" and not self.trains_in_server
            ),
        }

    def _rules_of_a_reference(self) -> dict[str, bool]:
        loss = self.loss
        return {
            "--kl-in-reward has no effect: --kl-coef, its weight, is 0": loss.kl_in_reward and not loss.kl_coef,
            "--reference-model would not be used: --kl-coef is 0": loss.reference_model is not None
            and not loss.kl_coef,
            **{
                f"--kl-in-reward cannot be combined with {flag(key)} {self.get(key):g}: the reference is not filtered,"
                " so each token would cost reward even where policy and reference agree, and short completions would be"
                " preferred; leave out --kl-in-reward (in the loss, the divergence has no such bias) or the filter": (
                    loss.kl_in_reward and self.get(key) != self.default(key)
                )
                for key in ("top_k", "top_p", "min_p")
            },
            f"--kl-coef {loss.kl_coef} needs a frozen reference, and --mode {self.mode} overwrites the only copy of the"
            " model at the first step; name one with --reference-model, or use --mode lora_only, whose base is the"
            " reference": loss.kl_coef > 0 and self.mode != "lora_only" and loss.reference_model is None,
        }

    def _rules_of_updates(self) -> dict[str, bool]:
        optimizer, dropout, top_entropy = self.optimizer, self.lora.dropout, self.loss.top_entropy
        batch_size, group_size = self.rollouts.batch_size, self.sampling.group_size
        updates, num_groups = optimizer.updates_per_batch, batch_size // group_size
        return {
            f"--warmup-steps {optimizer.warmup_steps} must be less than --training-steps {self.training_steps}: the"
            " learning rate would never reach --lr": optimizer.warmup_steps >= self.training_steps,
            "--offload-optimizer keeps float32 states in host memory; it cannot be combined with --optimizer"
            f" {optimizer.name}": (optimizer.offload and not OPTIMIZERS[optimizer.name].can_offload),
            f"--batch-size {batch_size} is not a multiple of --group-size {group_size}": bool(batch_size % group_size),
            f"--updates-per-batch {updates} does not divide the {num_groups} groups of a batch": (
                bool(num_groups % updates)
            ),
            f"--lora-dropout {dropout:g} needs one update per batch, found --updates-per-batch {updates} and"
            f" --passes-per-batch {optimizer.passes_per_batch}: each pass draws new dropout masks, so probability"
            " ratios would compare masks, not policies; leave one of them out": (
                dropout > 0 and optimizer.updates_per_step > 1
            ),
            f"--lora-dropout {dropout:g} cannot be combined with --top-entropy {top_entropy:g}, which takes another"
            " pass with other dropout masks; leave one of them out": dropout > 0 and top_entropy < 1,
        }

    def _rules_of_evaluations(self) -> dict[str, bool]:
        samples = self.evaluation.samples
        return {
            **{
                f"{flag(key)} {self.get(key):g} has no effect without --eval-samples, the number of completions per"
                " held-out problem": not samples
                for key in ("eval_interval", "eval_temperature", "eval_pass_reward")
                if self.get(key) != self.default(key)
            },
            f"--stop-at {self.stop_at} has no effect without --eval-interval: nothing is evaluated before the end": (
                (self.stop_at or "").startswith("eval_") and not self.evaluation.interval
            ),
            f"--eval-temperature 0 samples the same completion each time, found --eval-samples {samples}, not 1": (
                samples > 1 and self.evaluation.temperature == 0
            ),
        }
