"""Flags from configurations: each field of a `Config` becomes one flag of a command.

Not covered: what the fields mean (`bridge/config`), and how a wrong flag is reported (`main.py`).
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.markup import escape

from bridge.config.choices import Config, flag
from bridge.errors import UsageError

PANELS: Mapping[str | None, tuple[str, ...]] = {
    None: ("model", "model_name", "mode", "environment", "data", "training_steps", "save_path", "device"),
    "Several GPUs and hosts": ("gpus", "hosts", "rendezvous", "restarts"),
    "Batch and sampling": (
        "batch_size", "group_size", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed",
    ),
    "Continuous rollouts": (
        "max_staleness", "groups_in_flight", "in_flight_kv", "pause_while_training", "skip_without_signal",
        "max_oversampling",
    ),
    "Problems and rewards": (
        "env_args", "verifiers_python",
        "prompt_column", "answer_column", "system_prompt", "chat_template_kwargs", "reward", "reward_timeout_s",
        "reward_processes", "worker_env", "max_turns", "tool_timeout_s", "max_unscored_share", "overlong_buffer",
        "overlong_penalty",
    ),
    "Atropos": ("rollouts", "atropos_url", "atropos_timeout_s", "max_queued_batches"),
    "Loss": (
        "loss", "aggregation", "clip_low", "clip_high", "clip_dual", "ratio_level", "advantage_scale", "mask_truncated",
        "top_entropy", "kl_coef", "kl_in_reward", "reference_model", "mismatch", "mismatch_level",
        "mismatch_low", "mismatch_high", "mismatch_alarm",
    ),
    "Optimizer": (
        "lr", "lr_scheduler_type", "warmup_steps", "weight_decay", "beta1", "beta2", "max_grad_norm",
        "updates_per_batch", "passes_per_batch", "optimizer", "offload_optimizer", "gradient_release",
    ),
    "Evaluation and saving": (
        "stop_at", "eval_samples", "eval_interval", "eval_temperature", "eval_pass_reward", "eval_data",
        "eval_env_args",
        "save_interval", "keep_last", "save_optimizer", "resume", "run_dir", "save_rollouts", "tensorboard", "wandb",
    ),
    "Mode lora_only": (
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_handover", "max_lora_rank",
    ),
    "Mode none": ("vllm_restart_interval", "reload", "start_command", "trainer_device"),
    "Memory": (
        "gpu_memory_utilization", "max_model_len", "dtype", "tensor_parallel_size",
        "micro_batch_tokens", "gradient_checkpointing", "compile_layers", "liger_kernel", "kv_sleep",
    ),
    "Server": (
        "port", "host", "vllm_port", "vllm_host", "server_url", "vllm_config_path", "in_flight", "request_timeout_s",
        "max_retries", "max_concurrency",
    ),
}  # fmt: skip
"""Panel of the help text -> its fields, in the order shown; None is typer's own first panel."""

METAVARS: Mapping[Any, str] = {
    int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT", bool: "", tuple[str, ...]: "TEXT",
    dict[str, Any]: "JSON",
}  # fmt: skip
WIDEST_METAVAR = 16
"""Columns; a wider list of choices goes into the help text, or 80 columns do not hold the flags' names."""

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print the results as JSON objects on stdout.")]
TOML = "TOML file with choices; BRIDGE_* variables and flags override it."


def option(flag: str, metavar: str, text: str, **more: Any) -> Any:
    """Return an option of a command's own, whose default `text` explains."""
    return typer.Option(flag, metavar=metavar, help=text, show_default=False, show_envvar=False, **more)


def from_config(
    *configs: type[Config], hide: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `configs`, and pass it one resolved configuration per class.

    The command's keyword-only parameters are options of its own. A field that several classes know, by its name or
    by a synonym, is one flag. The fields in `hide` are left out of the help text.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = {p.name: p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY}

        def run(**given: Any) -> None:
            mine = {name: given.pop(name) for name in own}
            toml = given.pop("config")
            flags = _merged(given, configs)
            command(*(cls.resolve(flags, toml, beside=configs) for cls in configs), **mine)

        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        config = _parameter("config", Path, metavar="FILE", help=TOML)
        parameters = [*_flags(configs, hide), config, *own.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _merged(given: Mapping[str, Any], configs: tuple[type[Config], ...]) -> dict[str, Any]:
    """Drop what was not given, and refuse two flags that contradict each other about one field."""
    flags = {key: value for key, value in given.items() if value is not None}
    if flags.pop("single_copy", False):
        flags.setdefault("weight_bridge_mode", "shared_vllm")
    for key in [key for key in flags if key.startswith("no_")]:
        flags[key.removeprefix("no_")] = not flags.pop(key)
    seen: dict[tuple[type[Config], str], tuple[str, Any]] = {}
    for key, value in flags.items():
        for cls in configs:
            field = cls.field_of(key)
            other, before = seen.setdefault((cls, field), (key, value)) if field else (key, value)
            if before != value:
                raise UsageError(
                    f"{flag(other)} {before} and {flag(key)} {value} contradict each other: they are one choice",
                    remedy=f"give only one of {flag(other)} and {flag(key)}",
                )
    return flags


def _flags(configs: tuple[type[Config], ...], hide: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    """Yield the shown flags in the order of the panels, then every other name of a field."""
    shown: dict[str, FieldInfo] = {}
    for cls in configs:
        for name, choice in cls.choices().items():
            if name not in hide and not any(known in shown for known in (name, *_synonyms(name, configs))):
                shown[name] = choice.info
    places = [(panel, name) for panel, fields in PANELS.items() for name in fields]
    unplaced = shown.keys() - {name for _, name in places}
    assert not unplaced, f"in no panel of the help text: {unplaced}"
    for panel, name in places:
        if name in shown:
            kind = _kind(shown[name])
            text = _help(name, shown[name], kind, _synonyms(name, configs))
            more = {"metavar": _metavar(kind), "help": text, "show_default": False, "rich_help_panel": panel}
            yield _parameter(name, bool if kind is bool else str, **more)
    others = {name: cls.choices()[str(cls.field_of(name))].info for cls in configs for name in cls.names()}
    for name in sorted(others.keys() - shown.keys()):
        yield _parameter(name, bool if _kind(others[name]) is bool else str, hidden=True)
    for name in [f"no_{name}" for name in shown if _kind(shown[name]) is bool] + ["single_copy"] * ("mode" in shown):
        yield _parameter(name, bool, hidden=True)


def _synonyms(name: str, configs: tuple[type[Config], ...]) -> list[str]:
    """Return the other names of the field `name`, in whichever class it is one."""
    pairs = [pair for cls in configs for pair in cls.synonyms.items()]
    return sorted({other for pair in pairs if name in pair for other in pair} - {name})


def _parameter(name: str, kind: type, **more: Any) -> inspect.Parameter:
    option = typer.Option(flag(name), **more)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind | None, option])


def _kind(field: FieldInfo) -> Any:
    """Return the type behind `type | None`."""
    annotation: Any = field.annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # the latter for a Literal, on 3.11
        (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    return annotation


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is not Literal:
        return METAVARS[kind]
    choices = "|".join(typing.get_args(kind))
    return choices if len(choices) <= WIDEST_METAVAR else "CHOICE"


def _help(name: str, field: FieldInfo, kind: Any, synonyms: list[str]) -> str:
    text = re.sub(r"`([^`]+)`", r"[cyan]\1[/]", escape(field.description or ""))
    if _metavar(kind) == "CHOICE":
        text += f" One of {', '.join(typing.get_args(kind))}."
    also = [flag(other) for other in ([f"no_{name}"] if kind is bool else synonyms)]
    text += f" Also {', '.join(also)}." if also else ""
    if field.is_required():
        return text + escape(" [required]")
    if field.default in (None, PydanticUndefined) or "(default: " in text:  # the docstring explains it
        return text
    default = ("no", "yes")[field.default] if isinstance(field.default, bool) else field.default
    return text + escape(f" [default: {default}]")
