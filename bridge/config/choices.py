"""How choices are given: a TOML file, the environment and flags, merged and checked.

Not covered: which choices there are (`config.py`), and the command line itself (`cli/options.py`).
Precedence: TOML (`--config`) < environment (`BRIDGE_` + the field's name) < flags.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from bridge.config import borrowed
from bridge.errors import UsageError

ENVIRONMENT_PREFIX = "BRIDGE_"
DERIVED_LATER = "default_factory_not_called"
"""pydantic's word for a default that follows from other choices, and is not derived where one of them is at fault."""
NO_CHOICES = {"BRIDGE_MANIFEST_PATH"}
"""Variables of ours that one process sets for another: no person chooses by them."""


class Config(BaseModel):
    """A frozen set of choices that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    synonyms: ClassVar[Mapping[str, str]] = {}
    """Another name under which a field may be given -> the field."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """The same for names that no help text shows."""

    @classmethod
    def resolve(
        cls, flags: Mapping[str, Any], toml: Path | None = None, *, beside: tuple[type["Config"], ...] = ()
    ) -> Self:
        """Merge the TOML file, the environment and `flags` (None: not given), the later winning.

        Keys that only the classes `beside` it know are left to them.

        Raises:
            UsageError: an unknown key, a value of the wrong kind or out of range; all of them at once.
        """
        given: dict[str, Any] = {}
        named: dict[str, str] = {}
        for key, value, place in _given(flags, toml, (cls, *beside)):
            field = cls.field_of(key)
            if field is not None:
                given[field], named[field] = value, place
            elif not any(other.field_of(key) for other in beside):
                raise _unknown(key, place, (cls, *beside))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            found = [fault for fault in error.errors() if fault["type"] != DERIVED_LATER]
            faults = "; ".join(_fault(fault, named) for fault in found)
            raise UsageError(faults, remedy="see --help for every choice and its default") from error

    @classmethod
    def field_of(cls, key: str) -> str | None:
        """Return the field that `key` names, by its own name or another one; None if there is none."""
        field = cls.synonyms.get(key) or cls.aliases.get(key, key)
        return field if field in cls.model_fields else None

    @classmethod
    def names(cls) -> dict[str, None]:
        """Return every name under which a field may be given, the fields' own last."""
        return dict.fromkeys((*cls.aliases, *cls.synonyms, *cls.model_fields))


def _given(
    flags: Mapping[str, Any], toml: Path | None, classes: tuple[type[Config], ...]
) -> Iterator[tuple[str, Any, str]]:
    """Yield every given (key, value, how its place is named to a person), the strongest source last."""
    yield from ((key, value, f"{key} in {toml}") for key, value in _from_toml(toml).items())
    refuse_unknown_variables(os.environ)
    for key in dict.fromkeys(key for cls in classes for key in cls.names()):
        variable = ENVIRONMENT_PREFIX + key.upper()
        if os.environ.get(variable):
            yield key, os.environ[variable], variable
    yield from ((key, value, flag(key)) for key, value in flags.items() if value is not None)


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Check that each variable of ours is a choice of some command: a typo would go unnoticed.

    Raises:
        UsageError: one is not.
    """
    classes = tuple(_kinds(Config))
    known = {ENVIRONMENT_PREFIX + name.upper() for cls in classes for name in cls.names()} | NO_CHOICES
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and value and variable not in known:
            raise _unknown(variable.removeprefix(ENVIRONMENT_PREFIX).lower(), variable, classes)


def _kinds(cls: type[Config]) -> Iterator[type[Config]]:
    """Yield every kind of configuration, those of other commands too."""
    for kind in cls.__subclasses__():
        yield from (kind, *_kinds(kind))


def _from_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"no file {path}", remedy="--config takes a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}", remedy="mend the line that it names") from error


def _unknown(key: str, place: str, classes: tuple[type[Config], ...]) -> UsageError:
    known = [name for cls in classes for name in cls.names()]
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    is_variable = place.startswith(ENVIRONMENT_PREFIX)
    meant = [ENVIRONMENT_PREFIX + name.upper() if is_variable else name for name in near]
    remedy = borrowed.hint(key) or (f"did you mean {meant[0]}?" if meant else "see --help for every choice")
    return UsageError(f"{place}: there is no such choice", remedy=remedy)


def _fault(fault: Any, named: Mapping[str, str]) -> str:
    if not fault["loc"]:
        return str(fault["msg"]).removeprefix("Value error, ")
    field = str(fault["loc"][0])
    if fault["type"] == "missing":
        return f"{flag(field)} is missing"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ").replace("should", "must", 1)
    return f"{named.get(field, flag(field))}: {message.partition(', unable')[0]}, found {fault['input']!r}"


def flag(field: str) -> str:
    """Return the flag that sets `field`."""
    return "--" + field.replace("_", "-")
