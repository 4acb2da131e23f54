"""What a person chose for a run: what differs from the defaults, and between runs.

Not covered: which choices there are (`bridge/config`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import Config, flag

PLACES = ("save_path", "run_dir", "vllm_config_path", "vllm_port", "vllm_host", "resume")
"""Choices that say where, not what: two runs always differ in them."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of them."""

    flag: str
    """The flag that it is given by."""
    value: str
    """What was chosen, or derived."""
    default: str
    """What it is otherwise; empty where it has to be given, or this version does not know it."""
    about: str
    """What it means."""


def of_training(config: Mapping[str, Any]) -> tuple[list[Choice], list[Choice]]:
    """Return the choices of a run that differ from their defaults, and the others."""
    return _split(config, TrainConfig)


def of_server(config: Mapping[str, Any]) -> tuple[list[Choice], list[Choice]]:
    """Return the same of the server that a run has started."""
    return _split(config, ServeConfig)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return every choice in which runs differ, and its value in each; places apart."""
    names = dict.fromkeys(name for config in configs for name in config if name not in PLACES)
    rows = [(flag(name), [written(config[name]) if name in config else "–" for config in configs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def written(value: object) -> str:
    """Return a value as a person would write it."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


def _split(config: Mapping[str, Any], cls: type[Config]) -> tuple[list[Choice], list[Choice]]:
    changed: list[Choice] = []
    unchanged: list[Choice] = []
    for name, value in config.items():
        choice = _choice(name, value, cls)
        (unchanged if choice.value == choice.default else changed).append(choice)
    return changed, unchanged


def _choice(name: str, value: object, cls: type[Config]) -> Choice:
    known = cls.choices()[name].info if name in cls.choices() else None
    if known is None:
        return Choice(
            flag=flag(name), value=written(value), default="", about="This version of Bridge does not know it."
        )
    default = "" if known.is_required() else written(_plain(known.default))
    return Choice(flag=flag(name), value=written(value), default=default, about=known.description or "")


def _plain(default: object) -> object:
    """Return a default as JSON has it."""
    return default if default is None or isinstance(default, bool | int | float | str) else str(default)
