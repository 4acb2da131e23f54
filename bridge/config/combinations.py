"""Choices that exclude each other: one table, and one function that refuses them.

A row is refused as soon as both of its choices are known: when a `TrainConfig` is built, in `TrainConfig.tp_size` once
the GPUs of a server are known, and before a server is started, where its own choices are known, too.

Rules that are elsewhere, because they need more than two choices:

- A choice that has no effect without another one: its declaration (`only`), or an `if` of `TrainConfig`.
- Numbers that do not fit, such as a batch and its groups: `TrainConfig`, where both are computed.
- What the model, the GPUs or the installed software allow: `bridge/processes/start_checks.py`,
  `bridge/processes/vllm_flags.py` and `cli/bridge_cli/rank_gpus.py`, which read config.json or query the driver.
- What the running server allows: `bridge/modes`, `bridge/engine`, once they are attached to it.
- vLLM's own flags, after `--`: the table in `bridge/processes/vllm_flags.py`.
- What a single command does not take, such as `--servers` for `bridge run`: that command.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge.config.choices import Config, flag
from bridge.config.optimizers import OPTIMIZERS
from bridge.config.sections import ROW_LOSSES
from bridge.errors import UsageError


class Setting(NamedTuple):
    """A condition on one choice."""

    key: str
    """Key of the choice, or a property of `TrainConfig`."""
    matches: Callable[[Any], bool] | None
    """Whether the condition holds for this value; None: it holds for any value that the user gave."""


def on(key: str) -> Setting:
    """Return a condition that matches a switch that is on."""
    return Setting(key, lambda value: value is True)


def is_(key: str, *values: Any) -> Setting:
    """Return a condition that matches any of these values."""
    return Setting(key, lambda value: value in values)


def is_not(key: str, *values: Any) -> Setting:
    """Return a condition that matches every value except these."""
    return Setting(key, lambda value: value not in values)


def above(key: str, limit: float) -> Setting:
    """Return a condition that matches a number above `limit`."""
    return Setting(key, lambda value: value > limit)


def below(key: str, limit: float) -> Setting:
    """Return a condition that matches a number below `limit`."""
    return Setting(key, lambda value: value < limit)


def given(key: str) -> Setting:
    """Return a condition that matches any value that the user gave."""
    return Setting(key, None)


@dataclass(frozen=True)
class Exclusion:
    """A pair of conditions that must not hold together."""

    first: Setting
    second: Setting
    reason: str
    """The error; `{first}` and `{second}` stand for the flags with their values."""
    hint: str
    """What to do instead; it may contain the same two placeholders."""
    only_if: tuple[Setting, ...] = ()
    """Further settings that must hold for the row to apply."""

    def error(self, configs: tuple[Config, ...], more: dict[str, Any]) -> UsageError | None:
        """Return the error if both conditions hold; None if they do not, or if one of the values is unknown."""
        for key, matches in (self.first, self.second, *self.only_if):
            owner = _owner(key, configs)
            if key not in more and owner is None:
                return None
            if matches is None:
                applies = more.get(key) is not None or (owner is not None and owner.was_given(key))
            else:
                applies = matches(_value(key, owner, more))
            if not applies:
                return None
        first, second = (
            _shown(key, _value(key, _owner(key, configs), more)) for key in (self.first.key, self.second.key)
        )
        return UsageError(
            self.reason.format(first=first, second=second), hint=self.hint.format(first=first, second=second)
        )


def error(*configs: Config, **more: Any) -> UsageError | None:
    """Return the error for the first row that the configurations break; None if there is none.

    `more` maps keys to values. It adds choices that no configuration has, and overrides those in the configurations.
    """
    for row in EXCLUDED:
        if (broken := row.error(configs, more)) is not None:
            return broken
    return None


def refuse(*configs: Config, **more: Any) -> None:
    """Raise UsageError if the configurations make two choices that exclude each other; `more` as for `error`."""
    if (broken := error(*configs, **more)) is not None:
        raise broken


def _owner(key: str, configs: tuple[Config, ...]) -> Config | None:
    """Return the configuration that has this choice or property."""
    return next((config for config in configs if key in config.choices() or hasattr(type(config), key)), None)


def _value(key: str, owner: Config | None, more: dict[str, Any]) -> Any:
    if key in more or owner is None:
        return more[key]
    return owner.get(key) if key in owner.choices() else getattr(owner, key)


def _shown(key: str, value: Any) -> str:
    """Return a flag with its value, as a user would write it."""
    if value is True:
        return flag(key)
    return f"{flag(key)} {value:g}" if isinstance(value, float) else f"{flag(key)} {value}"


def _is_of_another_gpu(device: str) -> bool:
    """Return whether a value of `--trainer-device` names a GPU other than the first."""
    return device.partition(":")[2] not in ("", "0")


ONE_OF_THEM = "leave out one of them"
SHARDED = above("tensor_parallel_size", 1)
"""A server with its weights on several GPUs."""
SERVERS = Setting("servers", bool)
"""`--servers` with at least one server: a file from `bridge init` may set the default, which is empty."""
TRAINED_IN_SERVER = on("trains_in_server")
ADAPTED_EXPERTS = on("adapts_experts")
BY_DISK = is_("lora_handover", "disk")
ON_ROWS = is_("loss", "sft", "dpo")
OF_SAMPLED = (
    ("group_size", 8), ("advantage_scale", None), ("mask_truncated", False), ("top_entropy", 1.0),
    ("mismatch", "truncate"), ("max_staleness", 0), ("groups_in_flight", None), ("skip_without_signal", False),
    ("overlong_buffer", 0), ("router_replay", None),
)  # fmt: skip
"""Choices about completions that the run samples to train on, with their defaults."""
CANNOT_OFFLOAD = is_("optimizer", *(name for name, spec in OPTIMIZERS.items() if not spec.can_offload))

EXCLUDED: tuple[Exclusion, ...] = (
    # Several GPUs and hosts
    Exclusion(
        on("gradient_release"),
        above("context_parallel_size", 1),
        "{first} cannot be combined with {second}",
        ONE_OF_THEM,
    ),
    Exclusion(
        above("context_parallel_size", 1),
        SHARDED,
        "{first} trains on servers with one GPU each, found {second}",
        ONE_OF_THEM,
    ),
    Exclusion(
        is_("mode", "none"),
        SHARDED,
        "{first}: with several servers, each must have one GPU, found {second}",
        "leave out {second}",
        only_if=(above("replicas", 1),),
    ),
    Exclusion(
        is_("mode", "lora_only"),
        SHARDED,
        "{first}: with several servers, each must have one GPU, found {second}",
        "leave out {second}",
        only_if=(BY_DISK, above("replicas", 1)),
    ),
    *(
        Exclusion(
            Setting("trainer_device", _is_of_another_gpu),
            several,
            "{first} trains on one GPU, found {second}",
            "leave out {first} or {second}",
            only_if=only_if,
        )
        for several, only_if in ((above("gpus", 1), ()), (above("hosts", 1), ()), (SHARDED, (TRAINED_IN_SERVER,)))
    ),
    *(
        Exclusion(
            on("offload_optimizer"),
            several,
            "--offload-optimizer with --gradient-release trains on one GPU, found {second}",
            "leave out {first}, --gradient-release or {second}",
            only_if=(on("gradient_release"), *only_if),
        )
        for several, only_if in ((above("gpus", 1), ()), (above("hosts", 1), ()), (SHARDED, (TRAINED_IN_SERVER,)))
    ),
    Exclusion(
        on("gradient_release"),
        SHARDED,
        "{first} trains on servers with one GPU each, found {second}",
        "leave out {first} or {second}",
        only_if=(TRAINED_IN_SERVER,),
    ),
    *(
        Exclusion(
            is_("reload", "transfer"),
            several,
            "{first} sends from one trainer, found {second}",
            "leave out {second}; one trainer feeds several servers with bridge train --servers",
        )
        for several in (above("gpus", 1), above("hosts", 1))
    ),
    Exclusion(on("ray"), given("rendezvous"), "{second}: {first} chooses the hosts", "leave {second} out"),
    # Servers
    *(
        Exclusion(
            SERVERS,
            given(key),
            f"{flag(key)} names one server, but --servers names all of them",
            f"leave {flag(key)} out",
        )
        for key in ("vllm_config_path", "vllm_port", "vllm_host")
    ),
    Exclusion(
        SERVERS,
        is_("mode", "none"),
        "--servers: {second} trains with a single server, which it restarts",
        "leave it out; --vllm-port selects the server",
        only_if=(is_("reload", "restart"),),
    ),
    Exclusion(
        is_not("quantization", None),
        is_("mode", "none"),
        "{first} needs weights that are trained in vLLM's memory, or sent to it",
        "leave it out, use --mode shared_vllm or --reload transfer, or pass it to vLLM itself, after --: -- {first}",
        only_if=(is_("reload", "restart"),),
    ),
    Exclusion(
        is_not("quantization", None),
        is_("dtype", "float32"),
        "{first}: vLLM quantizes bfloat16 and float16, found {second}",
        "--dtype auto",
    ),
    Exclusion(
        is_("quantization", "fp8_per_channel"),
        SHARDED,
        "{first} uses scales that the server's GPUs would have to share, found {second}",
        "--quantization fp8_per_block",
        only_if=(is_not("reload", "transfer"),),
    ),
    # What an update does with the server
    *(
        Exclusion(
            on("router_replay"),
            other,
            "{first} needs --rollouts environment without --lora-handover disk, because nothing else reports experts;"
            " found {second}",
            ONE_OF_THEM,
        )
        for other in (is_not("rollouts", "environment"), BY_DISK)
    ),
    Exclusion(
        is_("kv_sleep", "always"),
        BY_DISK,
        "{first}: with {second} the server generates while the adapter is trained",
        ONE_OF_THEM,
    ),
    # Rows of a file in place of sampled completions
    *(
        Exclusion(
            ON_ROWS,
            is_not(key, default),
            "{second} has no effect with {first}, whose completions are given",
            "leave {second} out",
        )
        for key, default in OF_SAMPLED
    ),
    *(
        Exclusion(
            is_("loss", "dpo"),
            is_not(key, default),
            "{second} cannot be combined with {first}, a mean over pairs of what a reference scores, too",
            "leave {second} out",
        )
        for key, default in (("aggregation", None), ("kl_coef", 0), ("entropy_coef", 0))
    ),
    Exclusion(
        ON_ROWS,
        is_not("temperature", 1),
        "{first} trains log-probabilities at temperature 1, found {second}",
        "leave {second} out; evaluations have --eval-temperature",
    ),
    Exclusion(
        ON_ROWS,
        is_not("rollouts", "environment"),
        "{first} takes its completions from --data, found {second}",
        ONE_OF_THEM,
    ),
    Exclusion(
        ON_ROWS,
        above("warm_up_steps", 0),
        "{first} trains on rows in every step, found {second}",
        "leave the warm-up out, or --loss dapo for the steps after it",
    ),
    # The loss and its reference
    *(
        Exclusion(
            on("kl_in_reward"),
            is_not(key, default),
            "{first} cannot be combined with {second}: the reference is not filtered, so each token would cost reward"
            " even where policy and reference agree, and short completions would be preferred",
            "leave out --kl-in-reward (in the loss, the divergence has no such bias) or the filter",
        )
        for key, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    ),
    Exclusion(
        is_("group_size", 1),
        is_not("loss", "distill", *ROW_LOSSES),
        "{first} cannot be combined with {second}, which compares the rewards of a prompt's completions",
        "--group-size 2 or more; --loss distill trains on single completions",
    ),
    *(
        Exclusion(
            given("teacher"),
            is_not(key, default),
            "{first} cannot be combined with {second}: the teacher's distribution is not filtered",
            "leave out {second}",
        )
        for key, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    ),
    Exclusion(
        given("teacher"),
        is_("loss", *ROW_LOSSES),
        "{first} cannot be combined with {second}: a teacher judges sampled completions",
        "--loss distill, or leave {first} out",
    ),
    *(
        Exclusion(
            is_("loss", "distill"),
            other,
            "{second} has no effect with {first}, which trains on every completion, whatever its reward",
            "leave it out, or combine rewards with --teacher and --teacher-weight",
        )
        for other in (
            on("skip_without_signal"),
            below("top_entropy", 1),
            above("overlong_buffer", 0),
            is_not("advantage_scale", None),
        )
    ),
    *(
        Exclusion(
            compared,
            is_("mode", "shared_vllm", "none"),
            "{first} needs a frozen reference, but {second} overwrites the only copy of the model at the first step",
            "name one with --reference-model, or use --mode lora_only, whose base is the reference",
            only_if=(is_("reference_model", None),),
        )
        for compared in (above("kl_coef", 0), is_("loss", "dpo"))
    ),
    # The optimizer and the adapter
    Exclusion(
        on("offload_optimizer"),
        CANNOT_OFFLOAD,
        "{first} keeps float32 states in host memory; it cannot be combined with {second}",
        ONE_OF_THEM,
    ),
    *(
        Exclusion(
            above("lora_dropout", 0),
            above(key, 1),
            "{first} needs one update per batch, found {second}: each pass draws new dropout masks, so probability"
            " ratios would compare masks, not policies",
            ONE_OF_THEM,
        )
        for key in ("updates_per_batch", "passes_per_batch")
    ),
    Exclusion(
        above("lora_dropout", 0),
        below("top_entropy", 1),
        "{first} cannot be combined with {second}, which takes another pass with different dropout masks",
        ONE_OF_THEM,
    ),
    Exclusion(
        above("lora_dropout", 0),
        ADAPTED_EXPERTS,
        "{first}: neither PEFT nor vLLM supports dropout in adapters of experts",
        "leave out {first}, or experts in --lora-target-modules",
    ),
    Exclusion(
        Setting("lora_r", lambda rank: rank % 8 > 0),
        ADAPTED_EXPERTS,
        "{first}: the rank of an adapter of experts must be a multiple of 8, which grouped products need",
        "--lora-r 8 or a multiple of it, or leave experts out of --lora-target-modules",
    ),
    Exclusion(
        ADAPTED_EXPERTS,
        SHARDED,
        "--lora-target-modules experts: with --lora-handover memory each server must have one GPU, found {second}",
        "leave one of them out, or --lora-handover disk",
        only_if=(TRAINED_IN_SERVER,),
    ),
    # Evaluation
    Exclusion(
        is_("eval_temperature", 0),
        above("eval_samples", 1),
        "{first} samples the same completion each time, found {second}, not 1",
        "--eval-samples 1, or a temperature above 0",
    ),
)
"""Every pair of choices that is refused; the first one that is broken is reported."""
