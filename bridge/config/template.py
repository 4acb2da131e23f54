"""A TOML file with every choice of a configuration, explained by its docstring."""

import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from bridge.config.choices import Config

WIDTH = 100
"""Columns of an explanation."""
UNSET = "..."
"""Stands for the value of a choice without a default."""


def commented(classes: tuple[type[Config], ...], given: Mapping[str, Any]) -> str:
    """Return a TOML file that sets the choices in `given`, by key, and has every other one behind `#`.

    A choice that several classes know is written once, as the first of them declares it.
    """
    tables: dict[str, list[str]] = {"": []}
    for place, cls in enumerate(classes):
        for key, choice in cls.choices().items():
            if not any(earlier.field_of(key) for earlier in classes[:place]):
                *sections, field = choice.path
                for name in sections:
                    tables.setdefault(name, [_heading(cls, name)])
                tables["".join(sections)].append("\n".join(_lines(field, key, choice.info, given)))
    return "\n\n\n".join("\n\n".join(parts) for parts in tables.values()) + "\n"


def _heading(cls: type[Config], name: str) -> str:
    first, _, _ = (cls.model_fields[name].annotation.__doc__ or "").partition("\n")
    return f"[{name}] # {first}"


def _lines(field: str, key: str, info: FieldInfo, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the explanation of one choice, and its line."""
    text = " ".join((info.description or "").split())
    choices = [value for kind in (info.annotation, *typing.get_args(info.annotation)) for value in _literals(kind)]
    text += f" One of {', '.join(choices)}." if choices else ""
    yield from (f"# {line}" for line in textwrap.wrap(text, WIDTH - 2))
    if key in given:
        yield f"{field} = {_toml(given[key])}"
    else:
        has_default = not info.is_required() and info.default is not None
        yield f"#{field} = {_toml(info.default) if has_default else UNSET}"


def _literals(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # for text, numbers and truth values, TOML is written as JSON
