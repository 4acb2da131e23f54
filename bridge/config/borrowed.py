"""Names that TRL and verl give to choices of ours: accepted where they mean exactly the same, else a hint names ours.

Not covered: choices that both call by our name already.
"""

from collections.abc import Mapping

SERVE_ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "tensor_model_parallel_size": "tensor_parallel_size",
}
"""Another name -> the choice of `bridge serve-vllm` that is the same."""

ROLLOUT_ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model_name",
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
}
"""The same for whatever samples rollouts."""

TRAIN_ALIASES: Mapping[str, str] = {
    **ROLLOUT_ALIASES,
    "learning_rate": "lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "grad_clip": "max_grad_norm",
    "max_steps": "training_steps",
    "total_training_steps": "training_steps",
    "num_iterations": "passes_per_batch",
    "ppo_epochs": "passes_per_batch",
    "epsilon_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "importance_sampling_level": "ratio_level",
    "mask_truncated_completions": "mask_truncated",
    "kl_loss_coef": "kl_coef",
    "save_steps": "save_interval",
    "save_freq": "save_interval",
    "save_total_limit": "keep_last",
    "eval_steps": "eval_interval",
    "test_freq": "eval_interval",
    "lora_rank": "lora_r",
}
"""The same for a training run."""

_WHOLE = "rollouts come from the whole distribution, as the loss assumes; --temperature is all there is to choose"
_CONSTANT = "the learning rate is constant: --lr"
_DERIVED = "the micro-batch is derived from the memory that is free; --micro-batch-tokens sets it"
_SERVER = "the server is always vLLM: bridge run starts one, bridge train takes a running one (--vllm-port)"

HINTS: Mapping[str, str] = {
    "top_p": _WHOLE,
    "top_k": _WHOLE,
    "min_p": _WHOLE,
    "repetition_penalty": _WHOLE,
    "n": "--group-size: completions per prompt",
    "rollout_n": "--group-size: completions per prompt",
    "beta": "--kl-coef is the weight of the KL divergence, --beta1 and --beta2 are AdamW's",
    "epsilon": "--clip-low and --clip-high, one for each side",
    "clip_ratio": "--clip-low and --clip-high, one for each side",
    "delta": "--mismatch-high bounds the importance weight",
    "vllm_importance_sampling_cap": "--mismatch-high, with --mismatch truncate",
    "vllm_importance_sampling_correction": "--mismatch truncate, mask or none",
    "rollout_is": "--mismatch truncate, mask or none",
    "loss_type": "--loss dapo, grpo, dr_grpo or gspo",
    "adv_estimator": "--loss dapo, grpo, dr_grpo or gspo",
    "scale_rewards": "--advantage-scale group, batch or none",
    "norm_adv_by_std_in_grpo": "--advantage-scale group or none",
    "train_batch_size": "--batch-size counts completions, not prompts",
    "per_device_train_batch_size": "--batch-size: completions of a step",
    "generation_batch_size": "--batch-size: completions of a step",
    "gradient_accumulation_steps": _DERIVED,
    "ppo_micro_batch_size_per_gpu": _DERIVED,
    "ppo_max_token_len_per_gpu": _DERIVED,
    "steps_per_generation": "--updates-per-batch: optimizer steps on each batch",
    "ppo_mini_batch_size": "--updates-per-batch: optimizer steps on each batch",
    "num_train_epochs": "--training-steps: optimizer steps",
    "total_epochs": "--training-steps: optimizer steps",
    "max_prompt_length": "--max-model-len of the server bounds prompt and completion together",
    "lr_scheduler_type": _CONSTANT,
    "warmup_steps": _CONSTANT,
    "warmup_ratio": _CONSTANT,
    "entropy_coeff": "no loss here has an entropy bonus; --clip-high above --clip-low keeps entropy up",
    "use_vllm": _SERVER,
    "vllm_mode": _SERVER,
    "vllm_server_host": "--vllm-host",
    "vllm_server_port": "--vllm-port",
    "output_dir": "--run-dir, with the checkpoints in it; or --save-path for these alone",
    "default_local_dir": "--run-dir, with the checkpoints in it; or --save-path for these alone",
    "resume_from_checkpoint": "--resume, with --run-dir or --save-path",
    "resume_mode": "--resume, with --run-dir or --save-path",
    "report_to": "--wandb, --tensorboard",
    "logger": "--wandb, --tensorboard",
    "run_name": "--run-dir",
    "experiment_name": "--run-dir",
    "reward_funcs": "--reward NAME or file.py:function, or a class with --environment",
    "task": "--environment",
    "use_peft": "--mode lora_only",
    "dataset_name": "--environment gsm8k, or jsonl with --data",
    "train_files": "--environment jsonl with --data",
    "val_files": "--eval-data",
    "bf16": "--dtype bfloat16 of the server",
    "use_liger_kernel": "--liger-kernel, for the layers alone: the loss needs none",
    "use_liger_loss": "--liger-kernel, for the layers alone: the loss needs none",
    "optim": "--optimizer adamw, adamw-bf16, adamw-8bit or adamw-4bit",
    "target_modules": "--lora-target-modules",
}
"""Another name, of something that is not the same or not there -> what to do."""


def hint(name: str) -> str | None:
    """Return what to do in place of a choice that is not ours, by its name, its flag or verl's path; None: no idea."""
    return HINTS.get(name.lstrip("-").replace("-", "_").rpartition(".")[2])
