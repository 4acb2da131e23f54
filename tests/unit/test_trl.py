"""What `for_trl` and its callback refuse, and why: the trainer would train a copy, and the server would never change.

Not covered: a training run (`tests/cpu/test_trl.py`).
"""

import ast
import copy
import dataclasses
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback, TrainingArguments

import bridge
from bridge import trl, trl_settings
from bridge.errors import GradientError, IncompatibleVersionError, UsageError
from bridge.modes import shared_vllm
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.server.manifest import MANIFEST_NAME
from bridge.weights.model_folder import stored_buffers
from tests.models import chat, tiny
from tests.models.families import FAMILIES
from tests.unit import toy_server
from tests.unit.engine.test_policy import FenceClient, calls
from tests.unit.modes import lora_runs


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bridge.Policy]:
    """Attach to a server of the model that a test names, or of a Llama."""
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    monkeypatch.setattr(trl, "check_version", lambda: None)
    config = getattr(request, "param", tiny.llama)()
    toy = toy_server.serve(config, tmp_path / "model")
    with toy_server.attach(toy.manifest, tmp_path) as made:
        yield made


@pytest.fixture
def chatting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bridge.Policy]:
    """Like `policy`, with the tokens and the chat template of Qwen 3."""
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    monkeypatch.setattr(trl, "check_version", lambda: None)
    vocabulary = len(chat.tokenizer(tmp_path / "model", "qwen3"))
    toy = toy_server.serve(tiny.llama(vocabulary), tmp_path / "model")
    chat.tokenizer(tmp_path / "model", "qwen3")  # instead of the one that came with the weights
    with toy_server.attach(toy.manifest, tmp_path) as made:
        yield made


def own_fields(file: str) -> dict[str, ast.Call]:
    """Return the fields of the TRL dataclass in a file by name, since importing TRL takes seconds."""
    source = Path(str(distribution("trl").locate_file(f"trl/{file}.py"))).read_text()
    (definition,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {
        node.target.id: node.value
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
    }


GRPO_FIELDS = {
    name: ast.literal_eval(next(argument.value for argument in field.keywords if argument.arg == "default"))
    for name, field in own_fields("trainer/grpo_config").items()
}
OTHER_CONFIGS = (
    "trainer/rloo_config", "trainer/distillation_config", "trainer/sft_config", "experimental/sdft/sdft_config",
    "experimental/sdpo/sdpo_config", "experimental/gold/gold_config", "experimental/iw_opd/iw_opd_config",
)  # fmt: skip
"""Files of the other supported trainers' configs, of which GOLD's derives from that of supervised training."""
ALL_FIELDS = {field.name for field in dataclasses.fields(TrainingArguments) if field.init} | GRPO_FIELDS.keys()
MADE: dict[str, Any] = {
    "world_size": 1, "n_gpu": 1, "device": torch.device("cpu"), "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "seed": 42, "fp16": False, "optim": "adamw_torch_fused",
}  # fmt: skip
"""Fields that `for_trl` reads from transformers' part of a `GRPOConfig`."""
Config = dataclasses.make_dataclass(
    "GRPOConfig",
    [
        (name, Any, dataclasses.field(default=value))
        for name, value in {**GRPO_FIELDS, **MADE, "chat_template_path": None, "vllm_sync_frequency": 1}.items()
    ],
)


def choices(**changed: Any) -> Any:
    """Return a `GRPOConfig` with defaults except for `changed`."""
    args = Config()
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def generation_of(arguments: dict[str, Any]) -> trl.ServerGeneration:
    """Return what the trainer generates with, from what `for_trl` returned."""
    generation = arguments["callbacks"][-1]._generation
    assert isinstance(generation, trl.ServerGeneration)
    return generation


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stand in for TRL's modules that hold `VLLMGeneration`, since importing TRL takes seconds."""
    home, trainer = ModuleType(trl.GENERATION), ModuleType("trl.trainer.some_trainer")
    original = Mock(return_value="TRL's own")
    for module in (home, trainer):
        vars(module)[trl.STAND_IN_FOR] = original
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield SimpleNamespace(home=home, trainer=trainer, original=original)
    assert vars(home)[trl.STAND_IN_FOR] is vars(trainer)[trl.STAND_IN_FOR] is original


def begin(fence: trl.Fence, policy: bridge.Policy, args: Any, *, step: int = 0) -> None:
    """Create and start a trainer, as far as the callback and TRL's modules are concerned."""
    fence.on_init_end(args, None, None, model=policy.model)
    vars(sys.modules[trl.GENERATION])[trl.STAND_IN_FOR](model=fence._generation._model, mode="colocate")
    fence.on_train_begin(args, SimpleNamespace(global_step=step), None, model=policy.model)


REFUSED: dict[str, Any] = {
    "repetition_penalty": 1.1, "generation_kwargs": {"length_penalty": 2.0},
    "cache_implementation": "static", "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_memory_percent": 0.2}, "use_transformers_paged": True,
    "chat_template_path": "Qwen/Qwen3-0.6B", "vllm_sync_frequency": 2,
    "optim": "sgd", "optim_args": "a=1", "optim_target_modules": ["all"],
    "cast_lm_head_to_fp32": True, "fp16": True, "fp16_full_eval": True, "deepspeed": {"zero_stage": 2},
    "fsdp": "full_shard", "parallelism_config": object(),
    "vllm_mode": "server", "vllm_model_impl": "transformers", "vllm_enable_sleep_mode": True,
    "vllm_structured_outputs_regex": "[0-9]+", "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_host": "localhost", "vllm_server_port": 8001, "vllm_server_timeout": 10.0, "vllm_group_port": 1,
    "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 512, "vllm_tensor_parallel_size": 2,
    "vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.1,
    "vllm_importance_sampling_cap": 2.0,
}  # fmt: skip
"""Setting of `GRPOConfig` -> a value that would have no effect, or train a copy."""
PASSED_ON = {
    "adam_beta1", "adam_beta2", "adam_epsilon", "chat_template_kwargs", "learning_rate", "max_completion_length",
    "min_p", "seed", "temperature", "top_k", "top_p", "use_vllm", "weight_decay",
}  # fmt: skip
"""Settings that `for_trl` passes on to the optimizer and the server, or sets itself."""
OF_THE_LOSS = {
    "beta", "delta", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
    "epsilon", "epsilon_high", "importance_sampling_level", "label_smoothing_factor", "loss_type",
    "mask_truncated_completions", "multi_objective_aggregation", "num_iterations", "off_policy_mask_threshold",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "reward_weights", "router_aux_loss_coef", "sapo_temperature_neg",
    "sapo_temperature_pos", "scale_rewards", "sync_ref_model", "top_entropy_quantile", "use_adaptive_entropy",
    "use_bias_correction_kl", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos",
}  # fmt: skip
"""TRL computes these from the token ids and log-probabilities of a completion, wherever it was sampled. A reference
(`beta`) is a second model, loaded from the folder or name that the server was started with."""
OF_THE_PASSES = {
    "average_tokens_across_devices", "bf16", "bf16_full_eval", "disable_dropout", "full_determinism",
    "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs", "liger_kernel_config",
    "max_grad_norm", "neftune_noise_alpha", "pad_to_multiple_of", "tf32", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "torch_empty_cache_steps", "use_cache", "use_cpu", "use_liger_kernel",
}  # fmt: skip
"""They change how the trainer computes with the parameters, but not where the parameters lie, as `Fence` checks."""
OF_THE_SCHEDULE_AND_THE_DATA = {
    "accelerator_config", "auto_find_batch_size", "data_seed", "dataloader_drop_last", "dataloader_in_order",
    "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "generation_batch_size", "ignore_data_skip", "label_names",
    "length_column_name", "lr_scheduler_kwargs", "lr_scheduler_type", "max_steps", "num_generations",
    "num_generations_eval", "num_train_epochs", "per_device_eval_batch_size", "per_device_train_batch_size",
    "remove_unused_columns", "shuffle_dataset", "steps_per_generation", "train_sampling_strategy", "warmup_steps",
    "max_tool_calling_iterations", "model_init_kwargs", "trust_remote_code",
}  # fmt: skip
"""The last two are for a reference and for reward models; TRL warns that the trained model does not use them."""
OF_LOGS_AND_CHECKPOINTS = {
    "batch_eval_metrics", "debug", "disable_tqdm", "do_eval", "do_predict", "do_train", "enable_jit_checkpoint",
    "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start", "eval_steps", "eval_strategy",
    "eval_use_gather_object", "greater_is_better", "hub_always_push", "hub_model_id", "hub_private_repo",
    "hub_revision", "hub_strategy", "hub_token", "include_for_metrics", "include_num_input_tokens_seen",
    "load_best_model_at_end", "log_completions", "log_completions_hub_repo", "log_level", "log_level_replica",
    "log_multimodal", "log_on_each_node", "log_unique_prompts", "logging_first_step", "logging_nan_inf_filter",
    "logging_steps", "logging_strategy", "metric_for_best_model", "num_completions_to_print", "output_dir",
    "prediction_loss_only", "project", "push_to_hub", "report_to", "restore_callback_states_from_checkpoint",
    "resume_from_checkpoint", "run_name", "save_on_each_node", "save_only_model", "save_steps", "save_strategy",
    "save_total_limit", "skip_memory_metrics", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id",
}  # fmt: skip
"""`load_best_model_at_end` and resuming load weights inside the fence."""
WITHOUT_EFFECT_ALONE = {
    "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
    "ddp_timeout", "ds3_gather_for_generation", "fsdp_config", "local_rank",
}  # fmt: skip
"""Details of multi-process training, which is itself refused."""
OF_RLOO = {"normalize_advantages", "reward_clip_range"}
OF_DISTILLATION = {
    "distillation_add_tail", "distillation_alpha", "distillation_is_clip", "distillation_mode",
    "distillation_objective", "distillation_topk", "distillation_weight", "dont_reprompt_on_self_success",
    "diagnostics_flat_tolerance", "diagnostics_warning_interval", "environment_feedback_only_without_solution",
    "feedback_template", "generate_from_teacher", "include_environment_feedback", "iw_opd_epsilon", "iw_opd_gamma",
    "lmbda", "loss_add_tail", "loss_top_k", "max_prompt_length", "max_reprompt_len", "num_loss_tokens_to_skip",
    "remove_thinking_from_demonstration", "reprompt_template", "reverse_kl_top_1_mode", "seq_kd",
    "solution_template", "success_reward_threshold", "teacher_model_init_kwargs", "teacher_model_kind",
    "teacher_model_name_or_path", "teacher_model_revision", "teacher_model_server_url", "teacher_prompt_template",
    "teacher_sync_steps", "teacher_tokenizer_name_or_path", "teacher_update_rate", "uld_crossentropy_weight",
    "uld_distillation_weight", "uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight", "uld_skip_student_eos",
    "uld_skip_teacher_eos", "uld_student_temperature", "uld_teacher_temperature", "uld_token_merge_strategy",
    "uld_use_hybrid_loss", "use_extended_uld", "use_successful_as_teacher", "use_teacher_server", "use_uld_loss",
}  # fmt: skip
"""Settings of the loss and of the teacher, which is a frozen or averaged copy in the trainer, or a server.

SDFT and SDPO refuse `use_teacher_server`, as a test below shows."""
OF_SUPERVISED_TRAINING = {
    "activation_offloading", "assistant_only_loss", "callbacks", "completion_only_loss", "dataset_kwargs",
    "dataset_num_proc", "dataset_text_field", "eos_token", "eval_packing", "log_completions_steps", "max_length",
    "packing", "packing_strategy", "pad_token", "padding_free", "truncation_mode", "wandb_log_unique_prompts",
}  # fmt: skip
"""GOLD's config has them. TRL itself refuses to pack, or to leave out padding, with GOLD's collator."""
WORKS = (
    PASSED_ON | OF_THE_LOSS | OF_THE_PASSES | OF_THE_SCHEDULE_AND_THE_DATA | OF_LOGS_AND_CHECKPOINTS
    | WITHOUT_EFFECT_ALONE
)  # fmt: skip
TRAINER_ARGUMENTS = {
    "model": "for_trl's", "rollout_func": "TRL's", "args": "must be for_trl's", "peft_config": "refused",
    "tools": "TRL's", "environment_factory": "TRL's", "processing_class": "of for_trl", "callbacks": "of for_trl",
    "optimizers": "of for_trl", "reward_funcs": "TRL's", "train_dataset": "TRL's", "eval_dataset": "TRL's",
    "reward_processing_classes": "TRL's", "quantization_config": "for a reference; TRL warns",
}  # fmt: skip
"""Argument of `GRPOTrainer` -> who provides it; the tests below show each refusal."""


@pytest.mark.parametrize("installed", ["1.16.0", "1.16.3", "1.16.1.dev0"])
def test_every_patch_version_of_trl_is_accepted(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(trl_settings, "version", lambda _: installed)
    trl_settings.check_version()


@pytest.mark.parametrize("installed", ["1.10.0", "1.15.9", "1.16.0rc1", "1.17.0", "1.17.0.dev0", "2.16.0"])
def test_unsupported_trl_version_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(trl_settings, "version", lambda _: installed)
    with pytest.raises(IncompatibleVersionError, match=f"TRL {installed} is installed, expected 1.16") as refused:
        trl_settings.check_version()
    assert refused.value.hint == "pip install 'trl~=1.16.0'"


def test_every_setting_of_trl_works_or_is_refused() -> None:
    own = WORKS | OF_RLOO | OF_DISTILLATION | OF_SUPERVISED_TRAINING
    assert own.isdisjoint(REFUSED)
    assert own | REFUSED.keys() == ALL_FIELDS.union(*map(own_fields, OTHER_CONFIGS))
    source = Path(str(distribution("trl").locate_file("trl/trainer/grpo_trainer.py"))).read_text()
    (trainer,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "GRPOTrainer")
    (init,) = (node for node in trainer.body if getattr(node, "name", "") == "__init__")  # type: ignore[attr-defined]
    assert {argument.arg for argument in init.args.args} - {"self"} == TRAINER_ARGUMENTS.keys()


def test_default_settings_are_accepted_and_training_begins(policy: bridge.Policy, seam: SimpleNamespace) -> None:
    args = choices()
    (fence,) = bridge.for_trl(policy, args)["callbacks"]
    begin(fence, policy, args)
    assert "publish" not in calls(policy)
    assert not seam.original.called
    assert args.use_vllm
    assert not args.vllm_importance_sampling_correction, "it takes a third pass, which nobody requested"


def test_trainer_of_another_model_gets_trls_own_generation(policy: bridge.Policy, seam: SimpleNamespace) -> None:
    """As after a constructor of the policy's trainer that failed."""
    args = choices()
    (fence,) = bridge.for_trl(policy, args)["callbacks"]
    fence.on_init_end(args, None, None, model=policy.model)
    model = torch.nn.Linear(1, 1)
    assert seam.trainer.VLLMGeneration(model=model, mode="server") == "TRL's own"
    seam.original.assert_called_once_with(model=model, mode="server")


def test_trainer_that_generates_elsewhere_is_refused(policy: bridge.Policy, seam: SimpleNamespace) -> None:
    args = choices()
    (fence,) = bridge.for_trl(policy, args)["callbacks"]
    fence.on_init_end(args, None, None, model=policy.model)
    with pytest.raises(UsageError, match="does not generate with TRL's VLLMGeneration"):
        fence.on_train_begin(args, SimpleNamespace(global_step=0), None, model=policy.model)
    assert not seam.original.called


def test_config_of_another_kind_of_trainer_is_refused(policy: bridge.Policy) -> None:
    other = dataclasses.make_dataclass("OnlineDPOConfig", [("use_vllm", bool, True)])()
    with pytest.raises(UsageError, match="args is a OnlineDPOConfig, whose trainer does not generate with") as caught:
        bridge.for_trl(policy, other)
    assert "GRPOTrainer, RLOOTrainer, DistillationTrainer" in str(caught.value.hint)
    derived = dataclasses.make_dataclass("GMPOConfig", [], bases=(Config,))()
    assert isinstance(generation_of(bridge.for_trl(policy, derived)), trl.ServerGeneration)


def test_teacher_on_a_server_of_trls_own_is_refused(policy: bridge.Policy) -> None:
    added = [("use_teacher_server", bool, True), ("teacher_model_kind", str, "live")]
    with pytest.raises(UsageError, match="SDFTConfig has use_teacher_server=True, which requests"):
        bridge.for_trl(policy, sub_config("SDFTConfig", added))
    iw_opd = sub_config("IWOPDConfig", [("use_teacher_server", bool, True)])
    bridge.for_trl(policy, iw_opd)  # that teacher is another model, on a server of its own


def sub_config(name: str, fields: list[tuple[str, type, Any]]) -> Any:
    """Return a config of this name with further fields and their values."""
    made = [(field, kind, dataclasses.field(default=value)) for field, kind, value in fields]
    return dataclasses.make_dataclass(name, made, bases=(Config,))()


def test_second_model_of_a_trained_server_is_announced(policy: bridge.Policy, caplog: pytest.LogCaptureFixture) -> None:
    """TRL loads it from the folder of the served model, whose weights are the server's first ones."""
    bridge.for_trl(policy, choices(beta=0.1))
    policy.publish(lambda: None)
    bridge.for_trl(policy, choices(beta=0.0))
    bridge.for_trl(policy, sub_config("SDFTConfig", [("teacher_model_kind", str, "live")]))
    assert "TRL will load" not in caplog.text
    bridge.for_trl(policy, choices(beta=0.1))
    bridge.for_trl(policy, sub_config("SDFTConfig", [("teacher_model_kind", str, "ema")]))
    first, then = (record.message for record in caplog.records if "TRL will load" in record.message)
    assert f"weights are at version 1, but TRL will load the reference from {policy.model_name}, whose" in first
    assert "TRL will load the teacher from" in then


def test_correction_of_vllms_mismatch_needs_use_vllm(policy: bridge.Policy) -> None:
    corrected = choices(use_vllm=True, vllm_importance_sampling_mode="token_mask")
    bridge.for_trl(policy, corrected)
    assert corrected.vllm_importance_sampling_correction
    with pytest.raises(UsageError, match=r"vllm_importance_sampling_mode='token_mask', which has no effect") as caught:
        bridge.for_trl(policy, choices(vllm_importance_sampling_mode="token_mask"))
    assert "GRPOConfig(use_vllm=True)" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"vllm_importance_sampling_correction=True and top_p=0.9: it would compare"):
        bridge.for_trl(policy, choices(use_vllm=True, top_p=0.9))


@pytest.mark.parametrize("name", REFUSED)
def test_setting_without_effect_is_refused_by_name(policy: bridge.Policy, name: str) -> None:
    with pytest.raises(UsageError, match=f"GRPOConfig has {name}=") as caught:
        bridge.for_trl(policy, choices(**{name: REFUSED[name]}))
    assert f"leave {name} out" in str(caught.value.hint)


def test_all_settings_without_effect_are_refused_together(policy: bridge.Policy) -> None:
    with pytest.raises(UsageError, match=r"vllm_mode='server', vllm_server_port=8001, which has no effect"):
        bridge.for_trl(policy, choices(use_vllm=True, vllm_mode="server", vllm_server_port=8001))


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"n_gpu": 2}, "2 GPUs"), ({"device": torch.device("cuda:0")}, "would use cuda:0, but .* weights are on cpu")],
)
def test_different_device_is_refused(policy: bridge.Policy, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bridge.for_trl(policy, choices(**changed))


def test_callbacks_optimizers_and_tokenizer_are_passed_on(policy: bridge.Policy) -> None:
    mine, sgd = TrainerCallback(), torch.optim.SGD(policy.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd)
    tokenizer = AutoTokenizer.from_pretrained(policy.tokenizer.name_or_path)
    made = bridge.for_trl(
        policy, choices(optim="sgd"), callbacks=[mine], optimizers=(sgd, schedule), processing_class=tokenizer
    )
    assert made["callbacks"][0] is mine
    assert isinstance(made["callbacks"][1], trl.Fence)
    assert made["optimizers"] == (sgd, schedule)
    assert made["processing_class"] is tokenizer
    assert isinstance(bridge.for_trl(policy, choices())["optimizers"][0], InPlaceOptimizer)
    with pytest.raises(UsageError, match="the scheduler was made for a different optimizer"):
        bridge.for_trl(policy, choices(), optimizers=(None, schedule))


def test_weight_decay_and_epsilon_come_from_trls_arguments(policy: bridge.Policy) -> None:
    adamw = bridge.for_trl(policy, choices(weight_decay=0.1, adam_epsilon=1e-6))["optimizers"][0]
    decaying, others = adamw.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {group["eps"] for group in adamw.param_groups} == {1e-6}
    norms = {id(parameter) for name, parameter in policy.model.named_parameters() if "norm" in name}
    assert norms == {id(parameter) for parameter in others["params"]}
    assert len(decaying["params"]) + len(norms) == len([*policy.parameters()])


def test_tokenizer_with_different_ids_is_refused(policy: bridge.Policy, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path / "other", 200)
    with pytest.raises(UsageError, match="different ids than the server's model for 101 tokens"):
        bridge.for_trl(policy, choices(), processing_class=AutoTokenizer.from_pretrained(tmp_path / "other"))
    with pytest.raises(UsageError, match="processing_class is a str, expected a tokenizer"):
        bridge.for_trl(policy, choices(), processing_class=cast("Any", "a processor"))


def test_eos_tokens_are_those_of_the_server(policy: bridge.Policy) -> None:
    """Gemma lists its end-of-turn token only there: every completion would count as truncated, and be masked."""
    GenerationConfig(eos_token_id=[2, 77]).save_pretrained(policy.tokenizer.name_or_path)
    bridge.for_trl(policy, choices())
    assert policy.model.generation_config.eos_token_id == [2, 77]


def test_completion_may_end_with_the_end_of_turn_token(policy: bridge.Policy) -> None:
    """As in base models, where only the chat template names the token."""
    GenerationConfig(eos_token_id=2).save_pretrained(policy.tokenizer.name_or_path)
    end = policy.tokenizer.convert_ids_to_tokens(7)
    policy.tokenizer.add_tokens([end])
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message.content + '" + end + "' }}{% endfor %}"
    bridge.for_trl(policy, choices())
    assert policy.model.generation_config.eos_token_id == [2, 7]


def test_image_is_refused_where_trl_samples(policy: bridge.Policy) -> None:
    generation = generation_of(bridge.for_trl(policy, choices()))
    with pytest.raises(UsageError, match=r"a prompt or a tool's result has an image, but .* samples from text only"):
        generation.generate([[5], [6]], images=[None, ["picture"]], num_generations=1)


def answering(policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch, *texts: str) -> list[dict[str, Any]]:
    """Make the policy sample these texts, one per call and token by token, and return a list that records the calls.

    Each character is a token of its own, except in what `<...>` encloses: tokenizing the text would give other tokens.
    """
    made: list[dict[str, Any]] = []

    def sample(prompts: list[Any], *, n: int, **parameters: Any) -> list[bridge.Group]:
        text = texts[len(made)]
        pieces = re.findall(r"</?tool_call>|.", text, re.DOTALL)
        ids = tuple(token for piece in pieces for token in policy.tokenizer(piece)["input_ids"])
        ids = (*ids, policy.tokenizer.eos_token_id)
        made.append({"prompts": prompts, "n": n, "token_ids": [*ids], **parameters})
        completion = bridge.Completion(
            token_ids=ids, logprobs=(-1.0,) * len(ids), text=text, finish_reason="stop"
        )  # fmt: skip
        return [
            bridge.Group(
                problem=prompt, prompt_token_ids=tuple(prompt["prompt_token_ids"]), completions=(completion,) * n,
                rewards=(0.0,) * n,
            )
            for prompt in prompts
        ]  # fmt: skip

    monkeypatch.setattr(policy, "sample", sample)
    return made


def test_trl_tools_are_called_and_later_turns_sampled(
    chatting: bridge.Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TRL renders, calls and masks; it trains on the tokens that the server sampled, and encodes none of them again."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first one.
            b: The second one.

        Returns:
            The sum.
        """
        added.append((a, b))
        return a + b

    added: list[tuple[int, int]] = []
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 30, "b": 12}}\n</tool_call>'
    made = answering(chatting, monkeypatch, call, "It is 42.")
    args = GRPOConfig(
        str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", max_steps=1, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=512, learning_rate=1e-3,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": "30 + 12?"}]}] * 2)
    seen: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0, 1.0]

    trainer = GRPOTrainer(
        **bridge.for_trl(chatting, args), args=args, reward_funcs=reward, train_dataset=prompts, tools=[add]
    )
    loss = Mock(side_effect=trainer._compute_loss)
    monkeypatch.setattr(trainer, "_compute_loss", loss)
    trainer.train()
    assert added == [(30, 12)] * 2
    assert [message["role"] for message in seen[0]] == ["assistant", "tool", "assistant"]
    assert seen[0][1]["content"] == "42"
    first, then = made
    assert (len(first["prompts"]), first["n"], first["max_tokens"]) == (1, 2, 512)
    (prompt,), (whole,) = ([problem["prompt_token_ids"] for problem in sampled["prompts"]] for sampled in (first, then))
    assert '"name": "add"' in chatting.tokenizer.decode(prompt), "the model sees the tool"
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt) : len(prompt) + len(first["token_ids"])] == first["token_ids"]
    after = chatting.tokenizer.decode(whole[len(prompt) :])
    assert after.startswith(call)
    assert "42" in after.removeprefix(call)
    assert first["seed"] != then["seed"]
    assert chatting.tokenizer(call)["input_ids"] != first["token_ids"][:-1], "tokenizing gives other tokens"
    batch = loss.call_args.args[1]
    is_real, is_sampled = batch["completion_mask"].bool(), (batch["completion_mask"] * batch["tool_mask"]).bool()
    for row in range(2):
        conversation = batch["completion_ids"][row][is_real[row]].tolist()
        result = whole[len(prompt) + len(first["token_ids"]) :]
        assert conversation == [*first["token_ids"], *result, *then["token_ids"]]
        sampled = batch["completion_ids"][row][is_sampled[row]].tolist()
        assert sampled == [*first["token_ids"], *then["token_ids"]]
        assert batch["sampling_per_token_logps"][row][is_sampled[row]].unique().tolist() == [-1.0]
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.0)
    assert chatting.version == 1, "one step, inside the fence"


MESSAGES = [{"role": "user", "content": "30 + 12?"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "It is 41."}]
TRAINERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "RLOO": ("trl.trainer.rloo", {"prompt": MESSAGES}, {"num_generations": 2, "beta": 0.0}),
    "GMPO": ("trl.experimental.gmpo.gmpo", {"prompt": MESSAGES}, {"num_generations": 2}),
    "Distillation": ("trl.trainer.distillation", {"prompt": MESSAGES}, {}),
    "SDFT": ("trl.experimental.sdft.sdft", {"prompt": MESSAGES, "privileged_context": "42"}, {"num_generations": 2}),
    "SDPO": ("trl.experimental.sdpo.sdpo", {"prompt": MESSAGES}, {"num_generations": 2}),
    "GOLD": ("trl.experimental.gold.gold", {"messages": ANSWERED}, {"lmbda": 1.0, "max_length": 512}),
    "IWOPD": ("trl.experimental.iw_opd.iw_opd", {"messages": ANSWERED}, {"max_length": 512}),
}
"""Trainer -> its module, a row of its data, and its own settings."""


@pytest.mark.parametrize("name", TRAINERS)
def test_each_trainer_trains_on_the_sampled_tokens(
    chatting: bridge.Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """One step, inside the fence, whose passes contain the server's tokens as they were sampled."""
    from datasets import Dataset

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    chatting.tokenizer.pad_token = "<|endoftext|>"
    path, row, settings = TRAINERS[name]
    config_of = getattr(import_module(f"{path}_config"), f"{name}Config")
    trainer_of = getattr(import_module(f"{path}_trainer"), f"{name}Trainer")
    made = answering(chatting, monkeypatch, *["It is 42."] * 2)
    args = config_of(
        str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", max_steps=1, learning_rate=1e-3,
        per_device_train_batch_size=2, gradient_accumulation_steps=1, max_completion_length=64, save_strategy="no",
        **settings,
    )  # fmt: skip
    given: dict[str, Any] = {"args": args, "train_dataset": Dataset.from_list([row] * 2)}
    if name in ("Distillation", "GOLD", "IWOPD"):
        given["teacher_model"] = teacher_of(chatting)
    if name in ("RLOO", "GMPO", "SDPO"):
        given["reward_funcs"] = lambda completions, **_: [float(number % 2) for number, _ in enumerate(completions)]
    before = [parameter.detach().clone() for parameter in chatting.parameters()]
    passes = passes_of(chatting)
    trainer_of(**bridge.for_trl(chatting, args), **given).train()
    assert chatting.version == 1
    assert not all(torch.equal(*both) for both in zip(chatting.parameters(), before, strict=True))
    (prompt,), sampled = made[0]["prompts"], made[0]["token_ids"]
    assert chatting.tokenizer("It is 42.")["input_ids"] != sampled[:-1], "tokenizing gives other tokens"
    trained = [*prompt["prompt_token_ids"], *sampled]
    assert any(contains(ids, trained) for ids in passes)
    assert made[0]["max_tokens"] == 64


def test_distillation_with_tools_trains_on_sampled_tokens(
    chatting: bridge.Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from datasets import Dataset
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        return a + b

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 30, "b": 12}}\n</tool_call>'
    made = answering(chatting, monkeypatch, call, "It is 42.")
    args = DistillationConfig(
        str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", max_steps=1, learning_rate=1e-3,
        per_device_train_batch_size=2, gradient_accumulation_steps=1, max_completion_length=512,
    )  # fmt: skip
    teacher = teacher_of(chatting)
    passes = passes_of(chatting)
    DistillationTrainer(
        **bridge.for_trl(chatting, args), args=args, teacher_model=teacher, tools=[add],
        train_dataset=Dataset.from_list([{"prompt": MESSAGES}] * 2),
    ).train()  # fmt: skip
    first, then = made
    (whole,) = {tuple(problem["prompt_token_ids"]) for problem in then["prompts"]}
    asked = [*first["prompts"][0]["prompt_token_ids"], *first["token_ids"]]
    assert [*whole][: len(asked)] == asked
    assert "42" in chatting.tokenizer.decode(whole[len(asked) :])
    assert any(contains(ids, [*whole, *then["token_ids"]]) for ids in passes)
    assert chatting.version == 1


def teacher_of(policy: bridge.Policy) -> Any:
    """Return a copy of the policy's model with some other weights; after `for_trl` it cannot be copied."""
    teacher: Any = copy.deepcopy(policy.model)
    torch.nn.init.normal_(teacher.model.layers[0].mlp.down_proj.weight, std=0.2)
    return teacher


def passes_of(policy: bridge.Policy) -> list[list[int]]:
    """Return a list that gets the token ids of each row that the policy's model computes from now on."""
    rows: list[list[int]] = []

    def note(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        rows.extend((named["input_ids"] if "input_ids" in named else positional[0]).tolist())

    policy.model.model.register_forward_pre_hook(note, with_kwargs=True)
    return rows


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


def test_turn_after_a_tool_result_fits_the_servers_limit(
    policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL counts a tool result as part of the completion, and truncates what follows; the server would refuse it."""
    made = answering(policy, monkeypatch, "first", "short", "long")
    monkeypatch.setattr(policy.mode, "max_model_len", 20)
    generation = generation_of(bridge.for_trl(policy, choices(max_completion_length=8)))
    assert generation.llm.llm_engine.model_config.max_model_len == 20
    generation.sync_weights()
    generation.generate([[5] * 4] * 3, None, 3)
    prompts = [[5] * 12, [6] * 17]
    prompt_ids, token_ids, logprobs, sampled_ids = generation.generate(prompts, None, num_generations=1)
    assert prompt_ids == prompts
    assert [(len(call["prompts"]), call["n"], call["max_tokens"]) for call in made] == [(1, 3, 8), (1, 1, 3), (1, 1, 8)]
    assert len({call["seed"] for call in made}) == 3
    texts = [policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
    assert texts == ["long", "short"]
    assert [[ids for (ids,) in sequence] for sequence in sampled_ids] == token_ids
    assert [len(values) for values in logprobs] == [len(ids) for ids in token_ids]
    assert {value for values in logprobs for (value,) in values} == {-1.0}


def test_resumed_trainer_samples_with_the_same_seeds(
    policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch, seam: SimpleNamespace
) -> None:
    def seeds(first: int, last: int) -> list[list[int]]:
        made = answering(policy, monkeypatch, *(["a"] * 2 * (last - first)))
        args = choices()
        (fence,) = bridge.for_trl(policy, args)["callbacks"]
        begin(fence, policy, args, step=first)
        for _ in range(first, last):
            fence._generation.sync_weights()
            for _ in range(2):  # two turns of a conversation
                fence._generation.generate([[5]], None, 1)
        return [[made[2 * step]["seed"], made[2 * step + 1]["seed"]] for step in range(last - first)]

    whole = seeds(0, 4)
    assert len({seed for turns in whole for seed in turns}) == 8
    assert seeds(2, 4) == whole[2:]
    assert not seam.original.called


def test_trainer_with_different_args_is_refused(policy: bridge.Policy) -> None:
    (fence,) = bridge.for_trl(policy, choices())["callbacks"]
    with pytest.raises(UsageError, match=r"the trainer has different args than bridge\.for_trl") as caught:
        fence.on_init_end(choices(), None, None, model=policy.model)
    assert caught.value.hint == "GRPOTrainer(**for_trl(policy, args), args=args)"


def test_filters_of_the_policy_are_refused(policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "config", policy.config.changed(top_p=0.9))
    with pytest.raises(UsageError, match="samples with top_p, but GRPOConfig chooses") as caught:
        bridge.for_trl(policy, choices())
    assert "GRPOConfig(top_p=0.9)" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changed", "sampled_with"),
    [
        ({}, {}),
        ({"top_p": 1.0, "top_k": 0, "min_p": None}, {}),
        ({"top_p": 0.9, "top_k": 10, "min_p": 0.01}, {"top_p": 0.9, "top_k": 10, "min_p": 0.01}),
        ({"top_p": 0.9, "generation_kwargs": {"do_sample": True, "top_p": 0.5}}, {"top_p": 0.5}),
        ({"top_k": 10, "generation_kwargs": {"top_k": 0}}, {}),
    ],
)
def test_filters_of_the_trainer_reach_the_server(
    policy: bridge.Policy, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], sampled_with: dict[str, Any]
) -> None:
    made = answering(policy, monkeypatch, "a")
    generation_of(bridge.for_trl(policy, choices(**changed))).generate([[5]], None, 1)
    filters = {"top_p", "top_k", "min_p"}
    assert {name: value for name, value in made[0].items() if name in filters} == sampled_with


def test_off_policy_mask_with_filters_is_refused(policy: bridge.Policy) -> None:
    bridge.for_trl(policy, choices(off_policy_mask_threshold=0.5))
    with pytest.raises(UsageError, match=r"off_policy_mask_threshold=0.5 and top_p=0.9: it would compare"):
        bridge.for_trl(policy, choices(off_policy_mask_threshold=0.5, top_p=0.9))


def test_only_unusable_generation_kwargs_are_named(policy: bridge.Policy) -> None:
    given = {"do_sample": True, "top_k": 50, "num_beams": 2}
    with pytest.raises(UsageError, match=r"generation_kwargs=\{'num_beams': 2\}, which has no effect"):
        bridge.for_trl(policy, choices(generation_kwargs=given))


@pytest.mark.parametrize("own", [True, False])
def test_step_with_a_gradient_that_is_not_finite_is_skipped(
    policy: bridge.Policy, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = [*policy.parameters()]
    optimizer = policy.optimizer(lr=1e-3) if own else torch.optim.AdamW(parameters, lr=1e-3)
    args = choices()
    fence = trl.Fence(policy, args, trl.ServerGeneration(policy, args))

    def step(value: float) -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        fence.on_pre_optimizer_step(optimizer=optimizer)
        optimizer.step()  # the trainer's own call

    before = [parameter.detach().clone() for parameter in parameters]
    for value in (float("nan"), float("inf")):
        step(value)
    assert all(torch.equal(*both) for both in zip(parameters, before, strict=True))
    assert policy.version == 0
    assert "(2 consecutive; training ends after 3)" in caplog.text
    step(1e-3)
    assert policy.version == 1
    assert not all(torch.equal(*both) for both in zip(parameters, before, strict=True))
    step(float("nan"))
    step(float("nan"))
    with pytest.raises(GradientError, match="3 consecutive steps were not finite; they changed no weight"):
        step(float("nan"))
    assert policy.version == 1


def test_parameters_outside_the_servers_memory_are_refused(policy: bridge.Policy) -> None:
    """As with `peft_config`, or a model that was moved: its updates would never reach the server."""
    args = choices()
    (fence,) = bridge.for_trl(policy, args)["callbacks"]
    policy.model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"2 of the trainer's parameters .* adapter\.weight"):
        fence.on_init_end(args, None, None, model=policy.model)
    with pytest.raises(UsageError, match="pass neither peft_config nor a different model"):
        fence.on_train_begin(args, SimpleNamespace(global_step=0), None, model=policy.model)
    assert "publish" not in calls(policy)


def checkpoint(policy: bridge.Policy) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint as stored in its file: tied weights once, and all zeros."""
    return {name: torch.zeros_like(parameter) for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.usefixtures("seam")
def test_checkpoint_is_loaded_inside_one_fence(policy: bridge.Policy, num_files: int) -> None:
    """The trainer uses this method to resume and to load its best checkpoint; vLLM must never serve half of one."""
    args = choices()
    (fence,) = bridge.for_trl(policy, args)["callbacks"]
    names = [*checkpoint(policy)]
    for number in range(num_files):
        assert "pause" not in calls(policy)
        tensors = {name: tensor for name, tensor in checkpoint(policy).items() if name in names[number::num_files]}
        result = policy.model.load_state_dict(tensors, False)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert [call for call in calls(policy) if call != "lease"] == ["pause", "publish"]
    assert not any(parameter.any() for parameter in policy.parameters())
    begin(fence, policy, args)
    fence.on_train_end(None, None, None)


@pytest.mark.parametrize("policy", [FAMILIES["GLM-4.5"]], indirect=True, ids=["GLM-4.5"])
def test_checkpoint_is_loaded_after_the_file_with_its_buffer(policy: bridge.Policy) -> None:
    bridge.for_trl(policy, choices())
    buffers = stored_buffers(policy.model)
    assert buffers
    policy.model.load_state_dict(checkpoint(policy), False)
    assert "pause" not in calls(policy)
    policy.model.load_state_dict({name: torch.ones_like(buffer) for name, buffer in buffers.items()}, False)
    assert [call for call in calls(policy) if call != "lease"] == ["pause", "publish"]
    assert not any(parameter.any() for parameter in policy.parameters())
    assert all((buffer == 1).all() for buffer in buffers.values())


def test_checkpoint_without_all_weights_is_refused(policy: bridge.Policy) -> None:
    (fence,) = bridge.for_trl(policy, choices())["callbacks"]
    (name, _), *others = checkpoint(policy).items()
    policy.model.load_state_dict(dict(others), False)
    with pytest.raises(UsageError, match=f"lacks 1 of the model's parameters, the first: {name}"):
        fence.on_train_end(None, None, None)
    assert "pause" not in calls(policy)


def test_checkpoint_of_another_model_changes_no_weight(policy: bridge.Policy) -> None:
    bridge.for_trl(policy, choices())
    name = next(iter(checkpoint(policy)))
    with pytest.raises(UsageError, match=f"does not fit the model: {name} has shape"):
        policy.model.load_state_dict({name: torch.zeros(3)}, False)
    assert "pause" not in calls(policy)


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bridge.Policy]:
    """Attach to a server with an adapter, whose B is stored multiplied by 2."""
    monkeypatch.setattr(trl, "check_version", lambda: None)
    with lora_runs.world_in(tmp_path, monkeypatch) as world:
        world.export()
        with bridge.attach(tmp_path / MANIFEST_NAME, lora=bridge.LoraConfig(r=lora_runs.RANK, alpha=8)) as made:
            yield made


def test_trl_trainer_gets_the_adapters_peft_model(adapted: bridge.Policy) -> None:
    """With a PEFT model, TRL saves only adapters, and uses the frozen base as reference instead of a second copy."""
    model = bridge.for_trl(adapted, choices())["model"]
    assert isinstance(model, peft.PeftModel)
    assert model.get_base_model() is adapted.model


def test_saved_adapter_is_plain_and_reloads_inside_the_fence(adapted: bridge.Policy, tmp_path: Path) -> None:
    model, folder = bridge.for_trl(adapted, choices())["model"], tmp_path / "checkpoint-1"
    trained = {name: p for name, p in adapted.model.named_parameters() if p.requires_grad}
    adapted.publish(lambda: [parameter.data.fill_(0.5) for parameter in trained.values()])
    model.save_pretrained(folder, state_dict=None)
    saved = load_file(folder / "adapter_model.safetensors")
    assert {float(tensor.float().unique()) for name, tensor in saved.items() if "lora_A" in name} == {0.5}
    assert {float(tensor.float().unique()) for name, tensor in saved.items() if "lora_B" in name} == {0.25}
    version = adapted.version
    adapted.publish(lambda: [parameter.data.fill_(3.0) for parameter in trained.values()])
    model.load_adapter(str(folder), "default", is_trainable=True)
    assert adapted.version == version + 2
    assert {float(parameter.detach().float().unique()) for parameter in trained.values()} == {0.5}


def test_copies_of_the_adapter_have_no_separate_scaling(adapted: bridge.Policy, seam: SimpleNamespace) -> None:
    """TRL copies the adapter, whose B contains the scaling: PEFT's factor would multiply B a second time."""
    args = choices()
    made = bridge.for_trl(adapted, args)
    model, fence = made["model"], made["callbacks"][-1]
    layers = [module for module in adapted.model.modules() if isinstance(module, LoraLayer)]
    assert layers
    model.add_adapter("ref", model.peft_config["default"])  # GRPO's, before the callbacks
    fence.on_init_end(args, None, None, model=model)
    assert all(layer.scaling == {"default": 1.0, "ref": 1.0} for layer in layers)
    assert seam.trainer.VLLMGeneration(model=model) is fence._generation
    model.add_adapter("teacher", model.peft_config["default"])  # self-distillation's, when training begins
    fence.on_step_begin(args, None, None, model=model)
    assert all(layer.scaling == {"default": 1.0, "ref": 1.0, "teacher": 1.0} for layer in layers)
