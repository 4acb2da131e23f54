"""`bridge distill`: `bridge run --loss distill`, with a help text of the flags that matter."""

from bridge.config import ServeConfig, TrainConfig
from bridge.processes.server_process import START_LIMIT_S
from bridge_cli import run
from bridge_cli.options import Json, from_config
from bridge_cli.run import OnRay, StartLimit
from bridge_cli.serve_vllm import VllmFlags

SHOWN = {
    "model", "teacher", "teacher_weight", "divergence", "jsd_beta", "teacher_top_k", "offload_teacher", "mode",
    "environment", "data", "prompt_column", "reward", "training_steps", "batch_size", "group_size", "max_new_tokens",
    "temperature", "max_staleness", "lr", "optimizer", "lora_r", "gpus", "max_model_len", "gpu_memory_utilization",
    "eval_samples", "eval_interval", "save_interval", "run_dir", "resume",
}  # fmt: skip
"""Choices in the help text; every other choice of `bridge run` is accepted too."""
HIDDEN = tuple({*ServeConfig.model_fields, *TrainConfig.choices()} - SHOWN)


@from_config(ServeConfig, TrainConfig, hide=HIDDEN, fixed={"loss": "distill"})
def distill(
    serve: ServeConfig,
    train: TrainConfig,
    *,
    start_limit_s: StartLimit = START_LIMIT_S,
    on_ray: OnRay = False,
    as_json: Json = False,
    vllm_flags: VllmFlags = None,
) -> None:
    """Train a model to predict what a teacher predicts, on its own samples; every flag of bridge run is accepted.

    For example: bridge distill --model STUDENT --teacher MODEL --environment gsm8k
    """
    run.start(serve, train, start_limit_s=start_limit_s, on_ray=on_ray, as_json=as_json, vllm_flags=vllm_flags or [])
