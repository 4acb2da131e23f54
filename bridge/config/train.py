"""One training run.

Not covered: how choices are given and merged (`bridge/config/choices.py`), how rollouts are made (`rollouts.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bridge.config.borrowed import TRAIN_ALIASES
from bridge.config.choices import flag
from bridge.config.rollouts import RolloutConfig
from bridge.config.serve import DEFAULT_PORT
from bridge.core.address import Host, Urls


def learning_rate(mode: str | None) -> float:
    """Return the learning rate of a run in `mode` that was given none.

    1e-6 is TRL's for GRPO, and a small one; an adapter needs about ten times the rate of all weights.
    Source: `GRPOConfig` of TRL 1.16; "LoRA Without Regret", Schulman et al. 2025.
    """
    return 1e-5 if mode == "lora_only" else 1e-6


class TrainConfig(RolloutConfig):
    """One training run."""

    synonyms: ClassVar[Mapping[str, str]] = {"model": "model_name", "port": "vllm_port", "weight_bridge_mode": "mode"}
    aliases: ClassVar[Mapping[str, str]] = TRAIN_ALIASES

    mode: Literal["shared_vllm", "lora_only", "none"] = "shared_vllm"
    """How new weights reach vLLM: not at all, as an adapter, or by a checkpoint and a restart."""
    training_steps: int = Field(default=10, ge=1)
    """Optimizer steps."""
    rollouts: Literal["environment", "atropos"] = "environment"
    """What is learnt from: completions of the environment's problems, or batches of an Atropos API, which environments
    of its own feed."""
    atropos_url: Urls = "http://127.0.0.1:8000"
    """Where the Atropos API answers."""
    atropos_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a batch of the Atropos API after which the run ends."""
    batch_size: int = Field(default=64, ge=2)
    """Completions per step; a multiple of the group size."""
    lr: float = Field(default_factory=lambda chosen: learning_rate(chosen.get("mode")), gt=0)
    """Learning rate; absent: 1e-6 for all weights, 1e-5 for an adapter, in `lora_only`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float | None = Field(default=None, ge=0, lt=1)
    """Decay of AdamW's second moment; absent: 0.999, or 0.99 where the moments are bf16, which shrink no slower."""
    optimizer: Literal["adamw", "adamw-bf16", "adamw-8bit", "adamw-4bit"] = "adamw"
    """AdamW, named by its moments: float32, bf16, 8 or 4 bits; all but the last keep an exact float32 master."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and a float32 master, in host memory, and step there."""
    gradient_release: bool = False
    """Step each parameter as soon as its gradient is there, inside the fence, and drop the gradient."""
    loss: Literal["dapo", "grpo", "dr_grpo", "gspo"] = "dapo"
    """The policy loss, as its paper has it; the choices below overrule it part by part."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip of the probability ratio, as 1 - clip_low; absent: the loss's own."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip of the probability ratio, as 1 + clip_high; absent: the loss's own."""
    ratio_level: Literal["token", "sequence"] | None = None
    """What has a probability ratio: each token, or each completion; absent: as the loss has it."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Whose standard deviation advantages are divided by: the group's, the batch's, none; absent: the loss's own."""
    mask_truncated: bool = False
    """Train on no completion that was cut off by its length."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from a frozen reference in the loss."""
    reference_model: str | None = None
    """The frozen reference, held in memory beside the model; `lora_only` needs none: it switches its adapter off."""
    mismatch: Literal["truncate", "mask", "none"] = "truncate"
    """What is done where vLLM and the trainer differ in a token's probability: its importance weight is truncated
    (TIS), the token is left out beyond bounds (IcePop), or nothing."""
    mismatch_low: float = Field(default=0.5, ge=0, lt=1)
    """Least probability ratio, trainer to vLLM, that `--mismatch mask` trains on."""
    mismatch_high: float | None = Field(default=None, gt=1)
    """Largest importance weight, and largest ratio that is trained on; absent: 2 for `truncate`, 5 for `mask`."""
    mismatch_alarm: float = Field(default=0.1, gt=0)
    """Mean |difference of log-probabilities| in nats from which on a step is reported as unhealthy."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on each batch: its groups are cut into so many parts, one step each."""
    passes_per_batch: int = Field(default=1, ge=1)
    """How often each batch is gone through."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass; absent: as many as fit into the memory that is free."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, more time; absent: where too few tokens fit without."""
    compile_layers: bool | None = None
    """Compile the model's layers, which takes about a minute at the first step; absent: on a GPU."""
    liger_kernel: bool = False
    """Use liger-kernel's layers where it has them for the model, on a GPU."""
    kv_sleep: Literal["auto", "always", "never"] = "auto"
    """Free vLLM's KV cache while training: `auto` where training needs its memory and the server can."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What the fence does with other clients' requests that are under way."""
    vllm_host: Host = "127.0.0.1"
    """Where the server answers, if it is not what the manifest says."""
    vllm_port: int | None = Field(default=None, ge=1, le=65535)
    """The server's port; absent: the manifest's."""
    vllm_config_path: Path | None = None
    """The manifest; absent: searched for in $LOGDIR, the current folder and /tmp/atropos_bridge."""
    save_path: Path | None = None
    """Folder of the checkpoints, `step_N/` or `adapter_step_N/`; absent: `checkpoints/` in the run directory."""
    save_interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; the last step is always saved; 0: the last one only."""
    eval_samples: int = Field(default=0, ge=0)
    """Completions per held-out problem, before and after training; 0: no evaluation."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between two evaluations in between; 0: none."""
    save_rollouts: bool = True
    """Keep the text and the reward of every completion in the run directory's `rollouts.jsonl`."""
    tensorboard: bool | None = None
    """Write the metrics for TensorBoard into the run directory as well; absent: where it is installed."""
    wandb: bool = False
    """Send the metrics to Weights & Biases as well."""
    keep_last: int = Field(default=0, ge=0)
    """Checkpoints of this run that are kept, the newest; 0: all of them."""
    save_optimizer: bool = True
    """Keep in each checkpoint what a run needs to go on from it: with `adamw`, 10 bytes per trained parameter."""
    resume: bool = False
    """Resume from the newest whole checkpoint of --save-path or --run-dir, else of the newest run in runs/ with this
    model and task; without one, begin."""
    run_dir: Path | None = None
    """The run directory; absent: runs/ and the time."""
    trainer_device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where weights of the trainer's own lie: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU when there is one."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in front of the adapter while training; generation has none, so the two then differ. It goes with one
    update per batch."""
    lora_target_modules: str = "all-linear"
    """Modules that get an adapter, by the end of their names, separated by commas; `all-linear`: all but the head."""
    lora_handover: Literal["memory", "disk"] = "memory"
    """How the adapter reaches vLLM: trained in vLLM's own slot, or saved and loaded by the server."""
    vllm_restart_interval: int = Field(default=1, ge=1)
    """Steps between two reloads of the server."""
    reload: Literal["restart", "in-place"] = "restart"
    """How the server gets a checkpoint: started again with it, or, where it shares its weights, loaded into them."""
    start_command: str | None = None
    """Starts the server, with `{model}` where the model's folder goes; it is started, restarted and stopped by us."""

    def server_url(self, exported: str | None = None) -> str:
        """Return where the server answers: what its manifest says, with whatever part the user gave in its place."""
        scheme, _, address = (exported or f"http://{self.vllm_host}:{DEFAULT_PORT}").partition("://")
        if self.vllm_port is None and "vllm_host" not in self.model_fields_set:
            return f"{scheme}://{address}"
        host = f"[{self.vllm_host}]" if ":" in self.vllm_host else self.vllm_host
        return f"{scheme}://{host}:{self.vllm_port or address.rpartition(':')[2]}"

    @model_validator(mode="after")
    def _of_this_mode(self) -> Self:
        for field, modes in FIELDS_OF_MODES.items():
            if self.mode not in modes and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{flag(field)} means nothing in --mode {self.mode}, only in {' and '.join(modes)}")
        return self

    @model_validator(mode="after")
    def _of_these_rollouts(self) -> Self:
        for field, rollouts in FIELDS_OF_ROLLOUTS.items():
            if self.rollouts != rollouts and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{flag(field)} means nothing with --rollouts {self.rollouts}, only with {rollouts}")
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(f"--batch-size {self.batch_size} is no multiple of --group-size {self.group_size}")
        if self.batch_size // self.group_size % self.updates_per_batch:
            raise ValueError(
                f"--updates-per-batch {self.updates_per_batch} does not divide the "
                f"{self.batch_size // self.group_size} groups of a batch"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_if_asked_when(self) -> Self:
        if self.eval_interval and not self.eval_samples:
            raise ValueError(
                f"--eval-interval {self.eval_interval} evaluates nothing without --eval-samples, the number of"
                " completions per held-out problem"
            )
        return self

    @model_validator(mode="after")
    def _has_float32_states_in_host_memory(self) -> Self:
        if self.offload_optimizer and self.optimizer != "adamw":
            raise ValueError(
                f"--offload-optimizer keeps float32 states in host memory; it goes with no --optimizer {self.optimizer}"
            )
        return self

    @model_validator(mode="after")
    def _draws_no_masks_twice(self) -> Self:
        if self.lora_dropout > 0 and self.updates_per_batch * self.passes_per_batch > 1:
            raise ValueError(
                f"--lora-dropout {self.lora_dropout:g} needs one update per batch, found --updates-per-batch"
                f" {self.updates_per_batch} and --passes-per-batch {self.passes_per_batch}: each pass draws new dropout"
                " masks, so probability ratios would compare masks and not policies; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if self.kl_coef == 0 and self.reference_model is not None:
            raise ValueError("--reference-model would not be used: --kl-coef is 0")
        if self.kl_coef > 0 and self.mode != "lora_only" and self.reference_model is None:
            raise ValueError(
                f"--kl-coef {self.kl_coef} needs a frozen reference, and --mode {self.mode} trains in place: the only"
                " copy of the model is overwritten at the first step; name one with --reference-model, or take"
                " --mode lora_only, whose base is the reference"
            )
        return self


FIELDS_OF_MODES: Mapping[str, tuple[str, ...]] = {
    "trainer_device": ("lora_only", "none"),
    "reference_model": ("shared_vllm", "none"),
    "kv_sleep": ("shared_vllm", "lora_only"),
    "lora_r": ("lora_only",),
    "lora_alpha": ("lora_only",),
    "lora_dropout": ("lora_only",),
    "lora_target_modules": ("lora_only",),
    "lora_handover": ("lora_only",),
    "vllm_restart_interval": ("none",),
    "reload": ("none",),
    "start_command": ("none",),
}
"""Field -> the modes in which it means something; anywhere else it is refused."""

FIELDS_OF_ROLLOUTS: Mapping[str, str] = {
    "environment": "environment",
    "data": "environment",
    "eval_data": "environment",
    "prompt_column": "environment",
    "answer_column": "environment",
    "system_prompt": "environment",
    "reward": "environment",
    "reward_timeout_s": "environment",
    "reward_processes": "environment",
    "max_concurrency": "environment",
    "atropos_url": "atropos",
    "atropos_timeout_s": "atropos",
}
"""Field -> the one source of rollouts with which it means something; with another it is refused."""
