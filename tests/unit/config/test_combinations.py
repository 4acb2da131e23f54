from pathlib import Path
from typing import Any

import pytest

from bridge.config import ServeConfig, TrainConfig, combinations
from bridge.errors import UsageError

LORA = {"mode": "lora_only"}
DISTILLED = {"loss": "distill"}
TAUGHT = {"teacher": "t", "teacher_weight": 1.0}
BY_DISK = {**LORA, "lora_handover": "disk"}
REPLAY = (
    "--router-replay needs --rollouts environment without --lora-handover disk, because nothing else reports experts"
)
TRANSFER = {"mode": "none", "reload": "transfer", "trainer_device": "cuda"}
RELEASED = {"offload_optimizer": True, "gradient_release": True}
EXPERTS = {**LORA, "lora_target_modules": "q_proj, experts"}

TABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # other required choices, the pair that is excluded, and the beginning of the error
    (
        {},
        {"gradient_release": True, "context_parallel_size": 2},
        "--gradient-release cannot be combined with --context-",
    ),
    (
        {"gpus": 2},
        {"context_parallel_size": 2, "tensor_parallel_size": 2},
        "--context-parallel-size 2 trains on servers with one GPU each, found --tensor-parallel-size 2",
    ),
    (
        {"gpus": 2},
        {"mode": "none", "tensor_parallel_size": 2},
        "--mode none: with several servers, each must have one GPU, found",
    ),
    (
        {"hosts": 2, "lora_handover": "disk"},
        {"mode": "lora_only", "tensor_parallel_size": 2},
        "--mode lora_only: with several",
    ),
    (LORA, {"trainer_device": "cuda:1", "gpus": 2}, "--trainer-device cuda:1 trains on one GPU, found --gpus 2"),
    (LORA, {"trainer_device": "cuda:1", "hosts": 2}, "--trainer-device cuda:1 trains on one GPU, found --hosts 2"),
    (LORA, {"trainer_device": "cuda:1", "tensor_parallel_size": 2}, "--trainer-device cuda:1 trains on one GPU, found"),
    ({}, {**RELEASED, "gpus": 2}, "--offload-optimizer with --gradient-release trains on one GPU, found --gpus 2"),
    ({}, {**RELEASED, "hosts": 2}, "--offload-optimizer with --gradient-release trains on one GPU, found --hosts 2"),
    (
        {},
        {**RELEASED, "tensor_parallel_size": 2},
        "--offload-optimizer with --gradient-release trains on one GPU, found",
    ),
    (
        {},
        {"gradient_release": True, "tensor_parallel_size": 2},
        "--gradient-release trains on servers with one GPU each",
    ),
    ({"mode": "none"}, {"reload": "transfer", "gpus": 2}, "--reload transfer sends from one trainer, found --gpus 2"),
    ({"mode": "none"}, {"reload": "transfer", "hosts": 2}, "--reload transfer sends from one trainer, found --hosts 2"),
    ({}, {"ray": True, "rendezvous": "a:1"}, "--rendezvous a:1: --ray chooses the hosts"),
    (
        {},
        {"servers": "9001", "vllm_config_path": Path("m")},
        "--vllm-config-path names one server, but --servers names all",
    ),
    ({}, {"servers": "9001", "vllm_port": 9001}, "--vllm-port names one server, but --servers names all"),
    ({}, {"servers": "9001", "vllm_host": "127.0.0.1"}, "--vllm-host names one server, but --servers names all"),
    ({}, {"servers": "9001", "mode": "none"}, "--servers: --mode none trains with a single server"),
    (
        {},
        {"quantization": "fp8_per_block", "mode": "none"},
        "--quantization fp8_per_block needs weights that are trained",
    ),
    (
        {},
        {"quantization": "fp8_per_block", "dtype": "float32"},
        "--quantization fp8_per_block: vLLM quantizes bfloat16",
    ),
    (
        {},
        {"quantization": "fp8_per_channel", "tensor_parallel_size": 2},
        "--quantization fp8_per_channel uses scales that the server's GPUs would have to share",
    ),
    ({}, {"router_replay": True, "rollouts": "atropos"}, f"{REPLAY}; found --rollouts atropos"),
    (LORA, {"router_replay": True, "lora_handover": "disk"}, f"{REPLAY}; found --lora-handover disk"),
    (LORA, {"kv_sleep": "always", "lora_handover": "disk"}, "--kv-sleep always: with --lora-handover disk the server"),
    (
        {**LORA, "kl_coef": 0.1},
        {"kl_in_reward": True, "top_k": 20},
        "--kl-in-reward cannot be combined with --top-k 20: the reference is not filtered",
    ),
    (
        {**LORA, "kl_coef": 0.1},
        {"kl_in_reward": True, "top_p": 0.9},
        "--kl-in-reward cannot be combined with --top-p 0.9",
    ),
    (
        {**LORA, "kl_coef": 0.1},
        {"kl_in_reward": True, "min_p": 0.1},
        "--kl-in-reward cannot be combined with --min-p 0.1",
    ),
    (
        {"teacher_weight": 1.0},
        {"teacher": "t", "loss": "sft"},
        "--teacher t cannot be combined with --loss sft: a teacher judges",
    ),
    ({}, {"group_size": 1, "loss": "grpo"}, "--group-size 1 cannot be combined with --loss grpo, which compares"),
    ({}, {"group_size": 1, "loss": "my.py:f"}, "--group-size 1 cannot be combined with --loss my.py:f, which"),
    *(
        (DISTILLED, {"teacher": "t", key: value}, f"--teacher t cannot be combined with {shown}: the teacher's")
        for key, value, shown in (
            ("top_k", 20, "--top-k 20"),
            ("top_p", 0.9, "--top-p 0.9"),
            ("min_p", 0.1, "--min-p 0.1"),
        )
    ),
    *(
        (TAUGHT, {"loss": "distill", key: value}, f"{shown} has no effect with --loss distill")
        for key, value, shown in (
            ("skip_without_signal", True, "--skip-without-signal"),
            ("top_entropy", 0.5, "--top-entropy 0.5"),
            ("overlong_buffer", 8, "--overlong-buffer 8"),
            ("advantage_scale", "batch", "--advantage-scale batch"),
        )
    ),
    (
        {},
        {"kl_coef": 0.1, "mode": "none"},
        "--kl-coef 0.1 needs a frozen reference, but --mode none overwrites",
    ),
    (
        {},
        {"loss": "dpo", "mode": "none"},
        "--loss dpo needs a frozen reference, but --mode none overwrites",
    ),
    *(
        ({}, {"loss": "sft", key: value}, f"{shown} has no effect with --loss sft, whose completions are given")
        for key, value, shown in (
            ("group_size", 4, "--group-size 4"),
            ("advantage_scale", "batch", "--advantage-scale batch"),
            ("mask_truncated", True, "--mask-truncated"),
            ("top_entropy", 0.2, "--top-entropy 0.2"),
            ("mismatch", "none", "--mismatch none"),
            ("max_staleness", 1, "--max-staleness 1"),
            ("groups_in_flight", 64, "--groups-in-flight 64"),
            ("skip_without_signal", True, "--skip-without-signal"),
            ("overlong_buffer", 16, "--overlong-buffer 16"),
            ("router_replay", True, "--router-replay"),
        )
    ),
    *(
        (
            LORA,
            {"loss": "dpo", key: value},
            f"{shown} cannot be combined with --loss dpo, a mean over pairs",
        )
        for key, value, shown in (
            ("aggregation", "token_mean", "--aggregation token_mean"),
            ("kl_coef", 0.1, "--kl-coef 0.1"),
            ("entropy_coef", 0.1, "--entropy-coef 0.1"),
        )
    ),
    ({}, {"loss": "sft", "temperature": 0.7}, "--loss sft trains log-probabilities at temperature 1, found --temperat"),
    ({}, {"loss": "sft", "rollouts": "atropos"}, "--loss sft takes its completions from --data, found --rollouts atro"),
    (
        {"warm_up_data": "rows.jsonl"},
        {"loss": "sft", "warm_up_steps": 2},
        "--loss sft trains on rows in every step, found --warm-up-steps 2",
    ),
    (
        {},
        {"offload_optimizer": True, "optimizer": "adamw-8bit"},
        "--offload-optimizer keeps float32 states in host memory",
    ),
    (
        LORA,
        {"lora_dropout": 0.1, "updates_per_batch": 2},
        "--lora-dropout 0.1 needs one update per batch, found --updates",
    ),
    (
        LORA,
        {"lora_dropout": 0.1, "passes_per_batch": 3},
        "--lora-dropout 0.1 needs one update per batch, found --passes",
    ),
    (LORA, {"lora_dropout": 0.1, "top_entropy": 0.2}, "--lora-dropout 0.1 cannot be combined with --top-entropy 0.2"),
    (LORA, {"lora_dropout": 0.1, "lora_target_modules": "experts"}, "--lora-dropout 0.1: neither PEFT nor vLLM"),
    (
        LORA,
        {"lora_r": 4, "lora_target_modules": "experts"},
        "--lora-r 4: the rank of an adapter of experts must be a multiple of 8",
    ),
    (
        EXPERTS,
        {"tensor_parallel_size": 2},
        "--lora-target-modules experts: with --lora-handover memory each server must have one",
    ),
    (
        {},
        {"eval_temperature": 0, "eval_samples": 2},
        "--eval-temperature 0 samples the same completion each time, found",
    ),
]


def by_configuration(choices: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split choices into those of the server, of the training run, and of neither."""
    serve = {key: value for key, value in choices.items() if key in ServeConfig.choices()}
    train = {key: value for key, value in choices.items() if key in TrainConfig.choices()}
    return serve, train, {key: value for key, value in choices.items() if key not in serve and key not in train}


def refused(choices: dict[str, Any]) -> UsageError | None:
    """Return the error for the choices of a training run, a server and a command together."""
    serve, train, more = by_configuration(choices)
    try:
        combinations.refuse(TrainConfig.resolve({"model_name": "m", **train}), ServeConfig(model="m", **serve), **more)
    except UsageError as error:
        return error
    return None


@pytest.mark.parametrize(("needed", "choices", "message"), TABLE, ids=[message[:50] for *_, message in TABLE])
def test_excluded_choices_are_refused(needed: dict[str, Any], choices: dict[str, Any], message: str) -> None:
    error = refused({**needed, **choices})
    assert error is not None
    assert error.message.startswith(message)
    assert error.hint
    assert "{" not in error.message + error.hint


@pytest.mark.parametrize(("needed", "choices", "message"), TABLE, ids=[message[:50] for *_, message in TABLE])
def test_each_excluded_choice_is_accepted_by_itself(
    needed: dict[str, Any], choices: dict[str, Any], message: str
) -> None:
    for left_out in choices:
        kept = {key: value for key, value in choices.items() if key != left_out}
        error = refused({**needed, **kept})
        assert error is None or not error.message.startswith(message)


def test_every_excluded_combination_has_a_test_case() -> None:
    broken = set()
    for needed, choices, _ in TABLE:
        serve, train, more = by_configuration({**needed, **choices})
        configs = TrainConfig.of(model_name="m").changed(**train), ServeConfig(model="m", **serve)
        broken |= {number for number, row in enumerate(combinations.EXCLUDED) if row.error(configs, more)}
    assert broken == set(range(len(combinations.EXCLUDED)))


@pytest.mark.parametrize(
    "choices",
    [
        {**TRANSFER, "quantization": "fp8_per_channel", "tensor_parallel_size": 2},
        {**TRANSFER, "quantization": "fp8_per_block"},
        {"mode": "none", "reload": "in-place", "quantization": "fp8_per_block"},
        {"mode": "none", "reload": "in-place", "servers": "9001"},
        {"mode": "none", "trainer_device": "cuda:1", "tensor_parallel_size": 2},
        {"mode": "none", **RELEASED, "tensor_parallel_size": 2},
        {**EXPERTS, "lora_handover": "disk", "tensor_parallel_size": 2},
        {**EXPERTS, "lora_r": 8},
        {"kl_coef": 0.1, "reference_model": "other"},
        {"loss": "dpo", "reference_model": "other"},
        {"loss": "dpo", **LORA, "dpo_beta": 0.5},
        {
            "loss": "sft",
            **LORA,
            "kl_coef": 0.1,
            "aggregation": "sequence_mean",
            "eval_samples": 1,
            "environment": "gsm8k",
        },
        {"warm_up_data": "rows.jsonl", "warm_up_steps": 5, "group_size": 4, "temperature": 0.7},
        {**LORA, "kl_coef": 0.1, "kl_in_reward": True},
        {"eval_temperature": 0, "eval_samples": 1},
        {"lora_r": 16, **BY_DISK, "gpus": 2},
    ],
    ids=str,
)
def test_combinations_that_work_are_accepted(choices: dict[str, Any]) -> None:
    assert refused(choices) is None
