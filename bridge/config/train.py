"""Choices of one training run, nested by concern."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bridge.config.borrowed import TRAIN_ALIASES
from bridge.config.choices import Config, NoEffectError, Section, flag
from bridge.config.optimizers import OPTIMIZERS, OptimizerName
from bridge.config.rollouts import RolloutConfig, SamplingConfig, TaskConfig
from bridge.config.serve import DEFAULT_PORT
from bridge.core.address import Host

FULL_RATE, ADAPTER_RATE = 1e-6, 1e-5
"""Default learning rates. 1e-6 is TRL's for GRPO; an adapter needs about ten times the rate of all weights.

Source: `GRPOConfig` of TRL 1.16; "LoRA Without Regret", Schulman et al. 2025.
"""


AdvantageScale = Literal["group", "batch", "none", "leave_one_out"]


class LossConfig(Section):
    """The policy loss and the correction for the mismatch between vLLM and the trainer."""

    renamed: ClassVar[Mapping[str, str]] = {"name": "loss"}

    name: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo"] = "dapo"
    """Policy loss, as published; the choices below override parts of it."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Clip the probability ratio below 1 - clip_low (default: the loss's own)."""
    clip_high: float | None = Field(default=None, gt=0)
    """Clip the probability ratio above 1 + clip_high (default: the loss's own)."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Clip the probability ratio of tokens with a negative advantage above this, such as 3 (default: no such clip)."""
    ratio_level: Literal["token", "sequence"] | None = None
    """Compute probability ratios per token or per sequence (default: the loss's own)."""
    advantage_scale: AdvantageScale | None = None
    """Divide advantages by the standard deviation of the group, of the batch, or by 1; `leave_one_out` subtracts the
    mean of the group's other rewards instead of the mean of all (default: the loss's own)."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Give an advantage only to this share of an update's tokens, those where the policy's entropy is highest; below 1,
    this takes another forward pass."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from a frozen reference."""
    kl_in_reward: bool = False
    """Subtract the KL divergence from the reward of each token, instead of adding it to the loss."""
    reference_model: str | None = None
    """Frozen reference model, loaded beside the trained one; `lora_only` uses its own base instead."""
    mismatch: Literal["truncate", "mask", "none"] = "truncate"
    """Importance-sampling correction where vLLM and the trainer disagree on a token's probability: truncate its weight
    (TIS), mask the token outside the bounds (IcePop), or none."""
    mismatch_level: Literal["token", "sequence"] | None = None
    """Correct each token by its own weight, or each sequence by the product of its tokens' weights (default: `token`;
    `sequence` to truncate where the probability ratio is the sequence's)."""
    mismatch_low: float = Field(default=0.5, ge=0, lt=1)
    """Smallest trainer-to-vLLM ratio of a token or sequence that `--mismatch mask` keeps."""
    mismatch_high: float | None = Field(default=None, gt=1)
    """Largest importance weight, or largest ratio kept (default: 2 for `truncate`, 5 for `mask`)."""
    mismatch_alarm: float = Field(default=0.1, gt=0)
    """Warn when the mean absolute log-prob mismatch of a step exceeds this, in nats."""


class OptimizerConfig(Section):
    """The optimizer and the updates that it takes on each batch."""

    renamed: ClassVar[Mapping[str, str]] = {"name": "optimizer", "offload": "offload_optimizer"}

    name: OptimizerName = "adamw"
    """AdamW with moments in float32, bf16, 8 or 4 bits; all but the last keep an exact float32 master."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate (default: 1e-6, or 1e-5 for an adapter)."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "constant"
    """How the learning rate changes from update to update, as in transformers."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps (batches, not updates) during which the learning rate rises from 0 to --lr."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of all trained parameters, including norms and biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the second moment (default: 0.999, or 0.99 with bf16 moments, which cannot decay more slowly)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip gradients to this global norm."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Mini-batches per batch; each takes one optimizer step."""
    passes_per_batch: int = Field(default=1, ge=1)
    """Epochs over each batch."""
    offload: bool = False
    """Keep the optimizer state and a float32 master in host memory, and step there."""
    gradient_release: bool = False
    """Step each parameter inside the fence as soon as its gradient is ready, then free the gradient."""

    @property
    def updates_per_step(self) -> int:
        """Return the number of updates that are planned for each batch."""
        return self.updates_per_batch * self.passes_per_batch


class ComputeConfig(Section):
    """How forward and backward passes are computed."""

    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens per forward and backward pass (default: as many as fit in free memory)."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass (default: only when too few tokens fit without)."""
    compile_layers: bool | None = None
    """Compile the model's layers, which adds about a minute to the first step (default: on a GPU)."""
    liger_kernel: bool = False
    """Use Liger kernels for the layers that have them (GPU only)."""


class LoraConfig(Section):
    """The adapter of mode `lora_only`."""

    prefix: ClassVar[str] = "lora_"

    r: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale the adapter's output by lora_alpha / lora_r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input during training only; requires one update per batch."""
    target_modules: str = "all-linear"
    """Modules that get an adapter: suffixes of their names, separated by commas; `all-linear` is all but the head."""
    handover: Literal["memory", "disk"] = "memory"
    """How vLLM gets the adapter: trained in vLLM's own slot, or saved and loaded by the server."""


class PublishingConfig(Section):
    """How new weights reach the server."""

    renamed: ClassVar[Mapping[str, str]] = {"restart_interval": "vllm_restart_interval"}

    kv_sleep: Literal["auto", "always", "never"] = "auto"
    """Free vLLM's KV cache during training; `auto` does so when training needs the memory."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What an update does with other clients' in-flight requests: keep, drain or abort them."""
    in_flight_kv: Literal["auto", "keep", "recompute"] = "auto"
    """What becomes of the KV cache of in-flight requests at an update: keep it, or recompute it under the new weights;
    `auto` keeps it with --max-staleness."""
    pause_while_training: bool | None = None
    """Stop sampling while a step is computed, so that sampling and training never share the GPU (default: on a GPU,
    with --max-staleness)."""
    restart_interval: int = Field(default=1, ge=1)
    """Steps between two reloads of the server."""
    reload: Literal["restart", "in-place"] = "restart"
    """How the server loads a checkpoint: by a restart, or in place if it shares its weights."""
    start_command: str | None = None
    """Command that starts the server, with `{model}` for the model's folder; Bridge starts, restarts and stops it."""


class ServerConfig(Section):
    """Where the server is."""

    prefix: ClassVar[str] = "vllm_"

    host: Host = "127.0.0.1"
    """Host of the server, if it differs from the manifest's."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the server (default: the manifest's)."""
    config_path: Path | None = None
    """Path of the manifest (default: searched for in $LOGDIR, the current folder and /tmp/atropos_bridge)."""

    def url(self, exported: str | None = None) -> str:
        """Return the server's URL: the manifest's, with the parts that were chosen replaced."""
        scheme, _, address = (exported or f"http://{self.host}:{DEFAULT_PORT}").partition("://")
        if self.port is None and "host" not in self.model_fields_set:
            return f"{scheme}://{address}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port or address.rpartition(':')[2]}"


class CheckpointConfig(Section):
    """Which checkpoints are saved, and where."""

    save_path: Path | None = None
    """Folder for checkpoints, `step_N/` or `adapter_step_N/` (default: `checkpoints/` in the run directory)."""
    save_interval: int = Field(default=0, ge=0)
    """Save every N steps (default: only after the last step, which is always saved)."""
    keep_last: int = Field(default=0, ge=0)
    """Keep only the newest N checkpoints of this run (default: all)."""
    save_optimizer: bool = True
    """Save what a run needs to resume with each checkpoint: 10 bytes per trained parameter with `adamw`."""


class EvaluationConfig(Section):
    """Evaluation on held-out problems."""

    prefix: ClassVar[str] = "eval_"

    samples: int = Field(default=0, ge=0)
    """Completions per held-out problem, before and after training (default: no evaluation)."""
    interval: int = Field(default=0, ge=0)
    """Evaluate every N steps as well (default: only before and after training)."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of evaluations; 0 takes the likeliest tokens (default: --temperature)."""
    pass_reward: float = 1.0
    """Least reward of a completion that passes, in pass@k."""


class TrackingConfig(Section):
    """What is recorded of a run."""

    save_rollouts: bool = True
    """Write every completion, its turns and its rewards to `rollouts.jsonl` in the run directory."""
    tensorboard: bool | None = None
    """Write TensorBoard files to the run directory (default: if TensorBoard is installed)."""
    wandb: bool = False
    """Log to Weights & Biases."""


class TrainConfig(Config):
    """One training run."""

    synonyms: ClassVar[Mapping[str, str]] = {
        "model": "model_name",
        "port": "vllm_port",
        "weight_bridge_mode": "mode",
        "skip_groups_without_signal": "skip_without_signal",
    }
    aliases: ClassVar[Mapping[str, str]] = TRAIN_ALIASES

    model_name: str
    """Model to train: the folder or hub name that the server serves."""
    mode: Literal["shared_vllm", "lora_only", "none"] = "shared_vllm"
    """How new weights reach vLLM: shared memory, an adapter, or a checkpoint and a restart."""
    training_steps: int = Field(default=10, ge=1)
    """Steps to train: one batch and one published version each."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of this host to train on, with a replica of the model and a server on each, or on each
    --tensor-parallel-size of them; on a CPU, servers."""
    hosts: int = Field(default=1, ge=1)
    """Hosts to train on, with --gpus on each; the same command is started on every one of them."""
    rendezvous: str | None = None
    """Where the hosts meet, HOST:PORT: an address of one of them, which runs the first rank, and a free port there. Set
    BRIDGE_SECRET to the same value on every host."""
    restarts: int = Field(default=0, ge=0)
    """When a rank or a host is lost, resume from the newest checkpoint up to this many times; the remaining hosts wait
    for the lost one to be started again."""
    stop_at: str | None = None
    """End the run early, after a step or an evaluation with such a metric: `eval_reward_mean>=0.9`, `kl>=0.5`."""
    seed: int = Field(default=0, ge=0)
    """Seed for the order of the problems and for sampling."""
    run_dir: Path | None = None
    """Run directory (default: a new one in runs/)."""
    resume: bool = False
    """Resume from the newest complete checkpoint in --save-path or --run-dir, or of the latest run in runs/ with this
    model and task; start from step 1 if there is none."""
    trainer_device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
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
    def trains_in_server(self) -> bool:
        """Return whether what is trained lies in the server's memory, in as many parts as its weights."""
        return self.mode == "shared_vllm" or (self.mode == "lora_only" and self.lora.handover == "memory")

    @property
    def learning_rate(self) -> float:
        """Return the chosen learning rate, or the default of what is trained."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return ADAPTER_RATE if self.mode == "lora_only" else FULL_RATE

    def settled(self) -> Self:
        """Return these choices with the defaults that depend on others."""
        return self.changed(lr=self.learning_rate, max_new_tokens=self.sampling.longest)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for unused in self._without_effect():
            raise unused
        for fault in self._contradictions():
            raise ValueError(fault)
        return self

    def _without_effect(self) -> Iterator[NoEffectError]:
        for key, (switch, values) in EFFECTIVE.items():
            if self.get(switch) not in values and self.get(key) != self.default(key):
                only = f"only with {' and '.join(values)}"
                yield NoEffectError(
                    f"{flag(key)} has no effect with {flag(switch)} {self.get(switch)}, {only}",
                    remedy=f"{flag(switch)} {' or '.join(values)}, or leave {flag(key)} out",
                )

    def _contradictions(self) -> Iterator[str]:
        yield from self._unfit_rollouts()
        yield from self._unfit_gpus()
        yield from self._unfit_publishing()
        yield from self._unfit_reference()
        yield from self._unfit_optimizer()
        yield from self._unfit_evaluation()
        batch_size, group_size = self.rollouts.batch_size, self.sampling.group_size
        updates, num_groups = self.optimizer.updates_per_batch, batch_size // group_size
        passes = self.optimizer.passes_per_batch
        if batch_size % group_size:
            yield f"--batch-size {batch_size} is not a multiple of --group-size {group_size}"
        if num_groups % updates:
            yield f"--updates-per-batch {updates} does not divide the {num_groups} groups of a batch"
        if self.lora.dropout > 0 and self.optimizer.updates_per_step > 1:
            yield (
                f"--lora-dropout {self.lora.dropout:g} needs one update per batch, found --updates-per-batch {updates}"
                f" and --passes-per-batch {passes}: each pass draws new dropout masks, so probability ratios would"
                " compare masks, not policies; leave one of them out"
            )
        if self.lora.dropout > 0 and self.loss.top_entropy < 1:
            yield (
                f"--lora-dropout {self.lora.dropout:g} cannot be combined with --top-entropy {self.loss.top_entropy:g},"
                " which takes another pass with other dropout masks; leave one of them out"
            )

    def _unfit_publishing(self) -> Iterator[str]:
        if self.publishing.kv_sleep == "always" and self.mode == "lora_only" and not self.trains_in_server:
            yield "--kv-sleep always: with --lora-handover disk the server generates while the adapter is trained"

    def on_one_gpu(self) -> dict[str, bool]:
        """Return what trains on one GPU alone, and whether it was chosen."""
        return {
            f"--trainer-device {self.trainer_device}": self.trainer_device.partition(":")[2] not in ("", "0"),
            "--offload-optimizer with --gradient-release": self.optimizer.offload and self.optimizer.gradient_release,
        }

    def _unfit_gpus(self) -> Iterator[str]:
        if self.replicas == 1:
            return
        alone = [name for name, chosen in self.on_one_gpu().items() if chosen]
        found = f"--gpus {self.gpus}" + (f" on each of --hosts {self.hosts}" if self.hosts > 1 else "")
        yield from (f"{name} trains on one GPU, found {found}" for name in alone)

    def _unfit_reference(self) -> Iterator[str]:
        kl_coef, reference = self.loss.kl_coef, self.loss.reference_model
        if kl_coef == 0 and self.loss.kl_in_reward:
            yield "--kl-in-reward has no effect: --kl-coef, its weight, is 0"
        if kl_coef == 0 and reference is not None:
            yield "--reference-model would not be used: --kl-coef is 0"
        for key in ("top_k", "top_p", "min_p"):
            if self.loss.kl_in_reward and self.get(key) != self.default(key):
                yield (
                    f"--kl-in-reward cannot be combined with {flag(key)} {self.get(key):g}: the reference is not"
                    " filtered, so each token would cost reward even where policy and reference agree, and short"
                    " completions would be preferred; leave out --kl-in-reward (in the loss, the divergence has no such"
                    " bias) or the filter"
                )
        if kl_coef > 0 and self.mode != "lora_only" and reference is None:
            yield (
                f"--kl-coef {kl_coef} needs a frozen reference, and --mode {self.mode} overwrites the only copy of the"
                " model at the first step; name one with --reference-model, or use --mode lora_only, whose base is the"
                " reference"
            )

    def _unfit_optimizer(self) -> Iterator[str]:
        choices = self.optimizer
        if choices.warmup_steps >= self.training_steps:
            yield (
                f"--warmup-steps {choices.warmup_steps} must be less than --training-steps {self.training_steps}: the"
                " learning rate would never reach --lr"
            )
        if choices.offload and OPTIMIZERS[choices.name].offloaded_by is None:
            yield (
                "--offload-optimizer keeps float32 states in host memory; it cannot be combined with --optimizer"
                f" {choices.name}"
            )

    def _unfit_evaluation(self) -> Iterator[str]:
        samples, temperature = self.evaluation.samples, self.evaluation.temperature
        for key in ("eval_interval", "eval_temperature", "eval_pass_reward"):
            if not samples and self.get(key) != self.default(key):
                yield (
                    f"{flag(key)} {self.get(key):g} has no effect without --eval-samples, the number of completions per"
                    " held-out problem"
                )
        if (self.stop_at or "").startswith("eval_") and not self.evaluation.interval:
            yield f"--stop-at {self.stop_at} has no effect without --eval-interval: nothing is evaluated before the end"
        if samples > 1 and temperature == 0:
            yield f"--eval-temperature 0 samples the same completion each time, found --eval-samples {samples}, not 1"

    def _unfit_rollouts(self) -> Iterator[str]:
        num_groups = self.rollouts.batch_size // self.sampling.group_size
        if self.rollouts.overlong_buffer > self.sampling.longest:
            yield (
                f"--overlong-buffer {self.rollouts.overlong_buffer} is longer than the longest completion,"
                f" {self.sampling.longest} tokens (--max-new-tokens)"
            )
        at_once, most = self.rollouts.groups_in_flight, num_groups * (self.rollouts.max_staleness + 1)
        if at_once is not None and not num_groups <= at_once <= most:
            yield (
                f"--groups-in-flight {at_once} must be at least the {num_groups} groups of a batch, and at most {most}:"
                f" more could not be trained on within --max-staleness {self.rollouts.max_staleness}"
            )


EFFECTIVE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "clip_dual": ("loss", ("dapo", "grpo", "dr_grpo", "gspo", "rloo")),
    "mismatch_level": ("mismatch", ("truncate", "mask")),
    "trainer_device": ("mode", ("lora_only", "none")),
    "reference_model": ("mode", ("shared_vllm", "none")),
    **dict.fromkeys(("kv_sleep", "in_flight_kv", "pause_while_training"), ("mode", ("shared_vllm", "lora_only"))),
    **{LoraConfig.key(field): ("mode", ("lora_only",)) for field in LoraConfig.model_fields},
    **dict.fromkeys(("vllm_restart_interval", "reload", "start_command"), ("mode", ("none",))),
    **{
        TaskConfig.key(field): ("rollouts", ("environment",))
        for field in TaskConfig.model_fields
        if field != "max_unscored_share"
    },
    **dict.fromkeys(
        (
            "max_concurrency",
            "top_k",
            "top_p",
            "min_p",
            "max_staleness",
            "groups_in_flight",
            "skip_without_signal",
            "max_oversampling",
            "overlong_buffer",
            "overlong_penalty",
            "max_turns",
            "tool_timeout_s",
        ),
        ("rollouts", ("environment",)),
    ),
    "warmup_steps": ("lr_scheduler_type", ("constant_with_warmup", "linear", "cosine", "inverse_sqrt")),
    "atropos_url": ("rollouts", ("atropos",)),
    "atropos_timeout_s": ("rollouts", ("atropos",)),
}
"""Choice -> the switch that it depends on, and the switch's values with which it has an effect."""
