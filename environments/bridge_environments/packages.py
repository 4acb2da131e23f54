"""Environments of other packages, `verifiers:ID` and `reasoning_gym:TASK`, as classes like a user's own."""

from functools import partial
from typing import Any

from bridge.config import TaskConfig
from bridge.config.choices import flag
from bridge.errors import UsageError
from bridge_environments import reasoning_gym, verifiers

FORMS = (f"{verifiers.PREFIX}ID", f"{reasoning_gym.PREFIX}TASK")


def check(config: TaskConfig) -> None:
    """Check that no choice would be ignored.

    Raises:
        UsageError: a choice does not apply to the environment.
    """
    is_verifiers = config.environment.startswith(verifiers.PREFIX)
    is_gym = config.environment.startswith(reasoning_gym.PREFIX)
    where = f"it is for --environment {' and '.join(FORMS)}"
    places = {
        "env_args": (is_verifiers or is_gym, where),
        "eval_env_args": (is_verifiers or is_gym, where),
        "data": (not is_verifiers, "it has its own tasks"),
        "system_prompt": (not is_verifiers, "its tasks have their own"),
    }
    for name, (fits, why) in places.items():
        if not fits and getattr(config, name) != TaskConfig.model_fields[name].default:
            raise UsageError(
                f"{flag(name)} has no effect with --environment {config.environment}: {why}", remedy="leave it out"
            )


def kind(config: TaskConfig) -> type | None:
    """Return the class of the environment that `config` names, made without arguments; None if it is of no package."""
    name, has_held_out = config.environment, config.eval_env_args is not None
    base: Any
    if name.startswith(verifiers.PREFIX):
        base = verifiers.WithHeldOut if has_held_out else verifiers.Verifiers
        init = partial(base.__init__, python=config.verifiers_python)
    elif name.startswith(reasoning_gym.PREFIX):
        base = reasoning_gym.WithHeldOut if has_held_out else reasoning_gym.ReasoningGym
        init = base.__init__
    else:
        return None

    def make(self: Any) -> None:
        init(self, name.partition(":")[2], config.env_args, config.eval_env_args)

    title = base.__mro__[-2].__name__  # its name in messages, with held-out problems or without
    return type(title, (base,), {"__init__": make, "__module__": base.__module__})
