"""Choices of a training run by concern, and those of a server."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from bridge.config.choices import Config, flag
from bridge.config.declaration import Section, declare
from bridge.config.optimizers import OptimizerName
from bridge.config.rollouts import EVALUATION, LEAST_TEMPERATURE, MOST_TEMPERATURE, Names, RolloutConfig
from bridge.core.address import Host
from bridge.errors import UsageError
from bridge.types import Quantization

DEFAULT_PORT = 9001
MEMORY = "Memory"
RISING = ("constant_with_warmup", "linear", "cosine", "inverse_sqrt")
"""Schedules with a warmup."""
POLICY_LOSSES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo")
"""The published losses of completions that are sampled, and compared by their rewards."""
ROW_LOSSES = ("sft", "dpo")
"""The losses of given completions, which a run reads from a file."""
LOSS_NAMES = (*POLICY_LOSSES, "distill", *ROW_LOSSES)
WITH_RATIOS = (*POLICY_LOSSES, "distill")
"""The losses that may have probability ratios, which are clipped."""
OWN_WEIGHTS = "self"
"""The value of --teacher that stands for the trained model itself."""
DeviceChoice = Literal["auto", "cpu", "cuda"]
AdvantageScale = Literal["group", "batch", "none", "leave_one_out"]


class ServeConfig(Config):
    """How the patched vLLM is started."""

    model: str = declare(synonyms=("model_name",), borrowed=("model_name_or_path",), is_path=True)
    """Model to serve: a folder or a hub name."""
    port: int = declare(DEFAULT_PORT, ge=1, le=65535, panel="Server", synonyms=("vllm_port",))
    """TCP port of the server."""
    host: Host = declare("127.0.0.1", panel="Server")
    """Address to listen on (default: reachable from this machine only)."""
    device: DeviceChoice = declare("auto", position=3)
    """Device vLLM runs on; `auto` uses a GPU if there is one."""
    gpu_memory_utilization: float | None = declare(
        None, gt=0, lt=1, panel=MEMORY, borrowed=("vllm_gpu_memory_utilization",)
    )
    """Fraction of GPU memory for vLLM (default: what leaves room for the trainer)."""
    max_model_len: int | None = declare(None, ge=1, panel=MEMORY, borrowed=("vllm_max_model_length",))
    """Longest sequence, prompt plus completion, in tokens (default: the model's own limit)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = declare("auto", panel=MEMORY)
    """Data type of the weights; `auto` takes the model configuration's."""
    quantization: Quantization | None = declare(None, panel=MEMORY)
    """Sample with FP8 weights, quantized from the trained ones at every update. The FP8 copy adds half of the
    weights' memory; with --reload transfer it replaces the server's weights (default: sample with the trained ones)."""
    tensor_parallel_size: int = declare(
        1, ge=1, panel=MEMORY, borrowed=("vllm_tensor_parallel_size", "tensor_model_parallel_size")
    )
    """Number of GPUs that share one copy of the weights; `bridge run` starts a trainer for each."""
    max_lora_rank: int | None = declare(None, ge=1, panel="Mode lora_only", position=1)
    """Largest LoRA rank that the server accepts (default: --lora-r in bridge run, 32 in bridge tinker, otherwise no
    adapters)."""
    lora_experts: bool = declare(False, panel="Mode lora_only", position=1)
    """Accept adapters of routed experts, too: their slots take memory, and time at every token (GPU only)."""
    allow_vllm_flags: str = declare("", panel="Server")
    """vLLM flags to pass on although they are not known to be harmless, such as `new-flag,another` (default: none)."""
    vllm_config_path: Path | None = declare(None, panel="Server")
    """Where to write the manifest, a file or a folder (default: $LOGDIR, else the current folder); in bridge tinker,
    the manifest of a running server to attach to (default: start one)."""


class LossConfig(Section, panel="Loss", renamed={"name": "loss"}):
    """The loss, and the correction for the mismatch between vLLM and the trainer."""

    name: str = declare("dapo", is_path=True)
    """Policy loss: `dapo`, `grpo`, `dr_grpo`, `gspo`, `cispo` or `rloo` as published, or your own,
    `file.py:function`; the choices below override parts of it. `distill` is the divergence from a --teacher instead of
    rewards; `sft` and `dpo` train on the rows of --data."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """Average over all tokens, over completions after the tokens of each, or over a constant (default: the loss's own;
    `token_mean` for your own)."""
    clip_low: float | None = declare(None, gt=0, lt=1, borrowed=("clip_ratio_low",), only=("loss", WITH_RATIOS))
    """Clip the probability ratio below 1 - clip_low (default: the loss's own)."""
    clip_high: float | None = declare(
        None, gt=0, borrowed=("epsilon_high", "clip_ratio_high"), only=("loss", WITH_RATIOS)
    )
    """Clip the probability ratio above 1 + clip_high (default: the loss's own)."""
    clip_dual: float | None = declare(
        None, gt=1, borrowed=("delta", "clip_ratio_c"), only=("loss", ("dapo", "grpo", "dr_grpo", "gspo", "rloo"))
    )
    """Clip the probability ratio of tokens with a negative advantage above this, such as 3 (default: no such clip)."""
    ratio_level: Literal["token", "sequence"] | None = declare(
        None, borrowed=("importance_sampling_level",), only=("loss", WITH_RATIOS)
    )
    """Compute probability ratios per token or per sequence (default: the loss's own)."""
    advantage_scale: AdvantageScale | None = None
    """Divide advantages by the standard deviation of the group, of the batch, or by 1; `leave_one_out` subtracts the
    mean of the group's other rewards instead of the mean of all (default: the loss's own)."""
    mask_truncated: bool = declare(False, borrowed=("mask_truncated_completions",))
    """Leave truncated completions out of the loss."""
    top_entropy: float = declare(1.0, gt=0, le=1, borrowed=("top_entropy_quantile",))
    """Give an advantage only to this share of an update's tokens, those where the policy's entropy is highest; below 1,
    this takes another forward pass."""
    entropy_coef: float = declare(0.0, ge=0, borrowed=("entropy_coeff",))
    """Weight of the policy's entropy, a bonus that is subtracted from the loss: exact, over the whole vocabulary, or
    over the tokens that filters kept."""
    kl_coef: float = declare(0.0, ge=0, borrowed=("kl_loss_coef",))
    """Weight of the KL divergence from a frozen reference. Its value estimates KL(policy || reference) by k3; its
    gradient is that of KL(reference || policy), as in GRPO's paper."""
    dpo_beta: float = declare(0.1, gt=0, only=("loss", ("dpo",)))
    """Scale of the implicit rewards of `dpo`: log-probability ratios to the frozen reference times this."""
    kl_in_reward: bool = False
    """Subtract the KL divergence from the reward of each token, instead of adding it to the loss."""
    reference_model: str | None = declare(None, only=("mode", ("shared_vllm", "none")), is_path=True)
    """Frozen reference model of --kl-coef and `dpo`, loaded beside the trained one; `lora_only` uses its own base
    instead."""
    teacher: str | None = declare(None, synonyms=("teacher_url",), is_path=True)
    """Teacher of a distillation: a model, loaded once beside the trained one; `self`, the trained weights, which see
    the problem's `hint`; or a server's URL, which gives only log-probs of tokens (default: no teacher)."""
    teacher_weight: float | None = declare(None, gt=0)
    """Weight of the divergence from the teacher (default: 1 with --loss distill)."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled"] | None = None
    """Divergence from the teacher: reverse KL, forward KL or the generalized Jensen-Shannon divergence, exact over the
    whole vocabulary; or `sampled`, the sampled token's log-ratio as its advantage (default: `reverse_kl`; `sampled`
    with a URL)."""
    jsd_beta: float = declare(0.5, gt=0, lt=1, only=("divergence", ("jsd",)))
    """The teacher's share of the mixture that `jsd` compares both models with."""
    teacher_top_k: int = declare(0, ge=0)
    """With a URL, how many of the teacher's likeliest tokens to compare; all others count as one (default: none, only
    the sampled token)."""
    offload_teacher: bool = False
    """Keep the teacher's layers in host memory between its passes."""
    mismatch: Literal["truncate", "mask", "none"] = "truncate"
    """Importance-sampling correction where vLLM and the trainer disagree on a token's probability: truncate its weight
    (TIS), mask the token outside the bounds (IcePop), or none."""
    mismatch_level: Literal["token", "sequence"] | None = declare(None, only=("mismatch", ("truncate", "mask")))
    """Correct each token by its own weight, or each sequence by the product of its tokens' weights (default: `token`;
    `sequence` to truncate where the probability ratio is the sequence's)."""
    mismatch_low: float = Field(default=0.5, ge=0, lt=1)
    """Smallest trainer-to-vLLM ratio of a token or sequence that `--mismatch mask` keeps."""
    mismatch_high: float | None = Field(default=None, gt=1)
    """Largest importance weight, or largest ratio kept (default: 2 for `truncate`, 5 for `mask`)."""
    mismatch_alarm: float = Field(default=0.1, gt=0)
    """Warn when the mean absolute log-prob mismatch of a step exceeds this, in nats."""

    @field_validator("name")
    @classmethod
    def _names_a_loss(cls, name: str) -> str:
        if name not in LOSS_NAMES and not re.fullmatch(r".+\.py:\w+", name):
            raise ValueError(f"must be one of {', '.join(LOSS_NAMES)}, or path/to/file.py:function")
        return name

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function in the user's own file."""
        return self.name not in LOSS_NAMES

    @property
    def takes_rows(self) -> bool:
        """Whether the loss trains on given completions, which a run reads from a file instead of sampling them."""
        return self.name in ROW_LOSSES

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a frozen reference."""
        return self.kl_coef > 0 or self.name == "dpo"

    @property
    def has_remote_teacher(self) -> bool:
        """Whether the teacher is a server."""
        return self.teacher is not None and self.teacher.lower().startswith(("http://", "https://"))

    @property
    def exact_divergence(self) -> Literal["reverse_kl", "forward_kl", "jsd"] | None:
        """The divergence that is part of the loss; None: there is no teacher, or it changes advantages instead."""
        if self.teacher is None or self.divergence == "sampled":
            return None
        if self.has_remote_teacher and not self.teacher_top_k:
            return None
        return self.divergence or "reverse_kl"

    @property
    def uses_advantages(self) -> bool:
        """Whether the loss depends on advantages: those of rewards, or of sampled tokens under a frozen model."""
        return self.name != "distill" or self.exact_divergence is None or self.kl_in_reward

    def check_teacher(self) -> None:
        """Raise UsageError if the choices of the teacher do not fit together."""
        if self.teacher is None:
            for key in ("teacher_weight", "divergence", "teacher_top_k", "offload_teacher"):
                if getattr(self, key):
                    raise UsageError(
                        f"{flag(key)} has no effect without --teacher",
                        hint="--teacher MODEL, or leave it out",
                    )
            if self.name == "distill":
                raise UsageError(
                    "--loss distill needs a teacher, found none",
                    hint="--teacher MODEL, --teacher self with hints in the problems, or --teacher http://HOST:PORT",
                )
            return
        if self.name != "distill" and self.teacher_weight is None and not self.takes_rows:
            raise UsageError(
                f"--teacher {self.teacher} would not be used: --loss {self.name} has no weight for it",
                hint="--teacher-weight 1, or --loss distill for the divergence from the teacher alone",
            )
        if self.has_remote_teacher:
            if self.divergence not in (None, "sampled") and not self.teacher_top_k:
                raise UsageError(
                    f"--divergence {self.divergence}: a server does not give its whole distribution, as --teacher"
                    f" {self.teacher} would have to",
                    hint="--teacher-top-k 64, --divergence sampled, or name the teacher's model instead",
                )
        elif self.teacher_top_k:
            raise UsageError(
                f"--teacher-top-k {self.teacher_top_k} has no effect: --teacher {self.teacher} is computed in the"
                " trainer, over the whole vocabulary",
                hint="leave it out",
            )
        if self.teacher_top_k and self.divergence == "sampled":
            raise UsageError(
                f"--teacher-top-k {self.teacher_top_k} has no effect with --divergence sampled",
                hint="--divergence forward_kl, or leave --teacher-top-k out",
            )
        unused = next((key for key in ("clip_low", "clip_high", "ratio_level") if getattr(self, key) is not None), None)
        if unused is not None and not self.uses_advantages:
            raise UsageError(
                f"{flag(unused)} {getattr(self, unused)} has no effect with --divergence {self.exact_divergence}, which"
                " has no probability ratios",
                hint="--divergence sampled, or leave it out",
            )
        if self.offload_teacher and (self.has_remote_teacher or self.teacher == OWN_WEIGHTS):
            raise UsageError(
                f"--offload-teacher has no effect: --teacher {self.teacher} loads no second model",
                hint="leave it out",
            )


class OptimizerConfig(Section, panel="Optimizer", renamed={"name": "optimizer", "offload": "offload_optimizer"}):
    """The optimizer, and the updates that it makes on each batch."""

    name: OptimizerName = declare("adamw", position=1)
    """AdamW with moments in float32, 8 or 4 bits; all but the last keep an exact float32 master."""
    lr: float | None = declare(None, gt=0, borrowed=("learning_rate",))
    """Learning rate (default: 1e-6, or 1e-5 for an adapter)."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"] = "constant"
    """How the learning rate changes from update to update, as in transformers."""
    warmup_steps: int = declare(0, ge=0, borrowed=("lr_warmup_steps",), only=("lr_scheduler_type", RISING))
    """Steps (batches, not updates) during which the learning rate rises from 0 to --lr."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of all trained parameters, including norms and biases."""
    beta1: float = declare(0.9, ge=0, lt=1, borrowed=("adam_beta1",))
    """Decay of the first moment."""
    beta2: float = declare(0.999, ge=0, lt=1, borrowed=("adam_beta2",))
    """Decay of the second moment."""
    max_grad_norm: float = declare(1.0, gt=0, borrowed=("grad_clip", "clip_grad"))
    """Clip gradients to this global norm."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Mini-batches per batch; each takes one optimizer step."""
    passes_per_batch: int = declare(1, ge=1, borrowed=("num_iterations", "ppo_epochs"))
    """Epochs over each batch."""
    offload: bool = declare(False, position=1)
    """Keep the optimizer state and a float32 master in host memory, and step there."""
    gradient_release: bool = declare(False, position=1)
    """Step each parameter inside the fence as soon as its gradient is ready, then free the gradient."""

    @property
    def updates_per_step(self) -> int:
        """Return the number of updates that are planned for each batch."""
        return self.updates_per_batch * self.passes_per_batch

    @property
    def steps_in_backward(self) -> bool:
        """Return whether each parameter is stepped as soon as its gradient is ready: an update is one backward pass."""
        return self.gradient_release and not self.offload


class ComputeConfig(Section, panel=MEMORY):
    """How forward and backward passes are computed."""

    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens per forward and backward pass (default: as many as fit in free memory)."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass (default: only when too few tokens fit without it)."""
    activation_offload: bool | None = None
    """Keep what recomputed layers need in host memory (GPU only; default: when a sequence does not fit otherwise)."""
    compile_layers: bool | None = None
    """Compile the model's layers, which takes about a minute on a new host (default: on a GPU)."""
    attention: Literal["auto", "flash", "cudnn"] = "auto"
    """Attention kernel on a GPU: FlashAttention 2, or cuDNN for long sequences (default: cuDNN if its results are
    correct)."""
    router_replay: bool | None = declare(None, only=("mode", ("shared_vllm", "lora_only")))
    """Compute with the experts that the server chose for each token (default: in a mixture of experts whose server
    reports them)."""
    liger_kernel: bool = False
    """Use Liger kernels for the layers that have them (GPU only)."""

    def compiles_on(self, device_type: str) -> bool:
        """Return whether layers are compiled on this type of device: by default on `cuda`."""
        return device_type == "cuda" if self.compile_layers is None else self.compile_layers


class LoraConfig(Section, panel="Mode lora_only", only=("mode", ("lora_only",)), prefix="lora_"):
    """The adapter of mode `lora_only`."""

    r: int = declare(16, ge=1, borrowed=("lora_rank",))
    """Rank of the adapter; with --lora-handover memory one that vLLM has slots for: 1, 8, 16, 32, 64, 128, 256, 320 or
    512."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale the adapter's output by lora_alpha / lora_r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input during training only; requires one update per batch."""
    target_modules: str = "all-linear"
    """Modules that get an adapter: suffixes of their names, separated by commas. `all-linear` means all but the head;
    `experts` means the routed experts of a mixture (GPU only)."""
    handover: Literal["memory", "disk"] = "memory"
    """How vLLM gets the adapter: trained in vLLM's own slot, or saved and loaded by the server."""

    @field_validator("target_modules")
    @classmethod
    def _check_target_modules(cls, names: str) -> str:
        if "shared_expert_gate" in names:
            raise ValueError("must not name shared_expert_gate, whose adapter vLLM never applies: leave it out")
        return names

    @property
    def names(self) -> list[str]:
        """Return a list of the modules that get an adapter."""
        return [name.strip() for name in self.target_modules.split(",")]

    @property
    def has_experts(self) -> bool:
        """Return whether routed experts get an adapter."""
        return "experts" in self.names


class PublishingConfig(
    Section, panel="Mode none", only=("mode", ("none",)), renamed={"restart_interval": "vllm_restart_interval"}
):
    """How new weights reach the server."""

    kv_sleep: Literal["auto", "always", "never"] = declare(
        "auto", panel=MEMORY, only=("mode", ("shared_vllm", "lora_only"))
    )
    """Free vLLM's KV cache during training; `auto` does so when training needs the memory."""
    in_flight: Literal["keep", "wait", "abort"] = declare("keep", panel="Server", position=1, only=None)
    """What an update does with other clients' in-flight requests: keep, drain or abort them."""
    in_flight_kv: Literal["auto", "keep", "recompute"] = declare(
        "auto", panel=RolloutConfig.panel, only=("mode", ("shared_vllm", "lora_only"))
    )
    """What becomes of the KV cache of in-flight requests at an update: keep it, or recompute it under the new weights;
    `auto` keeps it with --max-staleness."""
    pause_while_training: bool | None = declare(
        None, panel=RolloutConfig.panel, only=("mode", ("shared_vllm", "lora_only"))
    )
    """Stop sampling while a step is computed, so that sampling and training never share the GPU (default: on a GPU,
    with --max-staleness)."""
    restart_interval: int = Field(default=1, ge=1)
    """Steps between two reloads of the server."""
    reload: Literal["restart", "in-place", "transfer"] = "restart"
    """How the server gets new weights: it loads a checkpoint, by a restart, or in place if it shares its weights;
    servers on other GPUs receive the weights through vLLM's weight transfer."""
    start_command: str | None = None
    """Command that starts the server, with `{model}` for the model's folder; Bridge starts, restarts and stops it."""


class ServerConfig(Section, panel="Server", prefix="vllm_", renamed={"servers": "servers"}):
    """Where the server is."""

    port: int | None = declare(None, ge=1, le=65535, synonyms=("port",))
    """Port of the server (default: the manifest's)."""
    host: Host = "127.0.0.1"
    """Host of the server, if it differs from the manifest's."""
    config_path: Path | None = None
    """Path of the manifest (default: searched for in $LOGDIR, the current folder and /tmp/atropos_bridge)."""
    servers: Names = ()
    """Train on several running servers, a replica on each: their manifests or addresses, separated by commas (default:
    the one of the manifest); with --reload transfer, one trainer sends its weights to all of them."""

    def url(self, exported: str | None = None) -> str:
        """Return the server's URL: the manifest's, with the host and port that the user chose."""
        scheme, _, address = (exported or f"http://{self.host}:{DEFAULT_PORT}").partition("://")
        if self.port is None and "host" not in self.model_fields_set:
            return f"{scheme}://{address}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = self.port or address.rpartition(":")[2]
        return f"{scheme}://{host}:{port}"


class CheckpointConfig(Section, panel=EVALUATION, position=2):
    """Which checkpoints are saved, and where."""

    save_path: Path | None = declare(None, panel="", position=2)
    """Folder for checkpoints, `step_N/` or `adapter_step_N/` (default: `checkpoints/` in the run directory)."""
    save_interval: int = declare(0, ge=0, borrowed=("save_steps", "save_freq"), counts_updates="save_steps")
    """Save every N steps (default: only after the last step, which is always saved)."""
    keep_last: int = declare(0, ge=0, borrowed=("save_total_limit",))
    """Keep only the newest N checkpoints of this run (default: all)."""
    save_optimizer: bool = True
    """Save with each checkpoint what a run needs to resume: 10 bytes per trained parameter with `adamw`."""


class EvaluationConfig(Section, panel=EVALUATION, prefix="eval_"):
    """Evaluation on held-out problems."""

    samples: int = Field(default=0, ge=0)
    """Completions per held-out problem, before and after training (default: no evaluation)."""
    interval: int = declare(0, ge=0, borrowed=("eval_steps", "test_freq"), counts_updates="eval_steps")
    """Evaluate every N steps as well (default: only before and after training)."""
    temperature: float | None = Field(default=None, ge=0, le=MOST_TEMPERATURE)
    """Sampling temperature of evaluations; 0 takes the likeliest tokens (default: --temperature)."""
    pass_reward: float = 1.0
    """Smallest reward that counts as a pass in pass@k."""

    @field_validator("temperature")
    @classmethod
    def _is_sampled_at(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, or at least {LEAST_TEMPERATURE}: vLLM raises lower temperatures to that")
        return temperature


class TrackingConfig(Section, panel=EVALUATION, position=4):
    """What is recorded about a run."""

    save_rollouts: bool = True
    """Write every completion, its turns and its rewards to `rollouts.jsonl` in the run directory."""
    tensorboard: bool | None = None
    """Write TensorBoard files to the run directory (default: if TensorBoard is installed)."""
    wandb: bool = False
    """Log to Weights & Biases."""
