"""Merge and check the choices from a TOML file, the environment and flags.

A configuration is nested by concern (`Section`), and every field has one flat name, its *key*: the flag without dashes,
the environment variable without its prefix. TOML takes tables, `[optimizer] lr = 1e-6`, or the flat key, `lr = 1e-6`.
Precedence: TOML (`--config`) < environment (`BRIDGE_` + key) < flags.
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError, model_validator

from bridge.config.declaration import Choice, Section, hint_for, nearest
from bridge.core.foreign_code import described, reason_of
from bridge.errors import UsageError

ENVIRONMENT_PREFIX = "BRIDGE_"
NO_CHOICES = {"BRIDGE_MANIFEST_PATH"}
"""`BRIDGE_` variables that are not choices of any command."""


class Config(Section):
    """All choices of one command."""

    caller_reports: ClassVar[bool] = True

    @classmethod
    def of(cls, **choices: Any) -> Self:
        """Build a configuration from flat keys."""
        return cls.model_validate(choices)

    @classmethod
    def resolve(
        cls, flags: Mapping[str, Any], toml: Path | None = None, *, beside: tuple[type["Config"], ...] = ()
    ) -> Self:
        """Merge the TOML file, the environment and `flags` (None: not given); later sources win.

        Keys that belong only to the classes `beside` this one are ignored.
        """
        given: dict[str, Any] = {}
        origins: dict[str, str] = {}
        names: dict[str, str] = {}
        for name, value, origin in _given(flags, toml, (cls, *beside)):
            key = cls.field_of(name)
            if key is not None:
                given[key] = value
                origins[key] = origin
                names[key] = name
            elif not any(other.field_of(name) for other in beside):
                raise _unknown(name, value, origin, (cls, *beside))
        try:
            config = cls.of(**given)
        except ValidationError as error:
            keys = {choice.path: key for key, choice in cls.choices().items()}
            faults = "; ".join(_fault(fault, keys, origins) for fault in error.errors())
            causes = (fault.get("ctx", {}).get("error") for fault in error.errors())
            hints = [cause.hint for cause in causes if isinstance(cause, UsageError)]
            hint = hints[0] if hints else "see --help for every choice and its default"
            raise UsageError(faults, hint=hint) from error
        for key, reason, hint in config.misread(names):
            raise UsageError(f"{origins[key]}: {reason}", hint=hint)
        return config

    def misread(self, names: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:  # noqa: ARG002
        """Yield (key, reason, hint) for each choice given by a borrowed name that has another meaning at its origin.

        `names` maps each key to the name that the user gave.
        """
        yield from ()

    @classmethod
    @cache
    def choices(cls) -> Mapping[str, Choice]:
        """Return every choice by its key, in the order of declaration."""
        choices: dict[str, Choice] = {}
        for key, top in cls.declared().items():
            section = _section(cls, top.path[0])
            choices |= section.declared(*top.path) if section else {key: top}
        return choices

    @classmethod
    @cache
    def names(cls) -> Mapping[str, str]:
        """Map every accepted name of a choice to its key; keys override synonyms, which override borrowed names."""
        choices = cls.choices().items()
        others = {name: key for key, one in choices for name in one.borrowed}
        synonyms = {name: key for key, one in choices for name in one.synonyms}
        return others | synonyms | {key: key for key, _ in choices}

    @classmethod
    def field_of(cls, name: str) -> str | None:
        """Return the key of the choice that `name` stands for; None if no choice has this name."""
        return cls.names().get(name)

    @classmethod
    def default(cls, key: str) -> Any:
        """Return the default of a choice."""
        return cls.choices()[key].info.default

    def get(self, key: str) -> Any:
        """Return one choice by its key."""
        return reduce(getattr, self.choices()[key].path, self)

    def was_given(self, key: str) -> bool:
        """Report whether the user made this choice, rather than leaving it at its default."""
        *sections, field = self.choices()[key].path
        return field in reduce(getattr, sections, self).model_fields_set

    def given(self) -> dict[str, Any]:
        """Return the choices that the user made, by key."""
        return {key: self.get(key) for key in self.choices() if self.was_given(key)}

    def changed(self, **choices: Any) -> Self:
        """Return a copy with new values for these keys, without checking them."""
        nested = self._nested(choices)
        for name, value in nested.items():
            if _section(type(self), name):
                nested[name] = getattr(self, name).model_copy(update=value)
        return self.model_copy(update=nested)

    def document(self, settled: Self | None = None) -> dict[str, Any]:
        """Return the content of `config.json`: these choices and, separately, the values that `settled` derived."""
        document = self.model_dump(mode="json")
        before = flattened(type(self), document)
        after = flattened(type(self), (settled or self).model_dump(mode="json"))
        derived = {key: value for key, value in after.items() if value != before[key]}
        return {**document, "derived": derived}

    @classmethod
    def written(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choices of a `document` by key, with derived values in place of absent ones.

        Runs of earlier versions wrote flat keys and nothing derived.
        """
        choices = flattened(cls, {name: value for name, value in document.items() if name != "derived"})
        derived = document.get("derived")
        if isinstance(derived, Mapping):
            choices |= derived
        return choices

    @model_validator(mode="before")
    @classmethod
    def _takes_flat_keys(cls, document: Any) -> Any:
        return cls._nested(flattened(cls, document)) if isinstance(document, Mapping) else document

    @classmethod
    def _nested(cls, choices: Mapping[str, Any]) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for key, value in choices.items():
            *sections, field = cls.choices()[key].path if key in cls.choices() else (key,)
            reduce(lambda table, name: table.setdefault(name, {}), sections, nested)[field] = value
        return nested


def flag(key: str) -> str:
    """Return the flag of a choice."""
    return "--" + key.replace("_", "-")


def flattened(cls: type[Config], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of a JSON or TOML document by key: tables are flattened."""
    return {key: value for key, value, _ in _entries((cls,), document)}


def _entries(classes: tuple[type[Config], ...], document: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, table) of each choice in `document`; the table of a flat key is empty."""
    for name, value in document.items():
        section = next((kind for cls in classes if (kind := _section(cls, name))), None)
        if section is None or not isinstance(value, Mapping):
            yield name, value, ""
        else:
            for field, inner in value.items():
                key = section.key(field) if field in section.model_fields else field
                yield key, inner, name


def _section(cls: type[Config], name: str) -> type[Section] | None:
    kind = cls.model_fields[name].annotation if name in cls.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _given(
    flags: Mapping[str, Any], toml: Path | None, classes: tuple[type[Config], ...]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, origin for messages) of everything given, the source with the highest precedence last."""
    for name, value, table in _entries(classes, _from_toml(toml)):
        place = f"[{table}] of {toml}" if table else str(toml)
        yield name, value, f"{name} in {place}"
    _refuse_unknown_variables()
    for key in dict.fromkeys(key for cls in classes for key in cls.names()):
        variable = ENVIRONMENT_PREFIX + key.upper()
        if os.environ.get(variable):
            yield key, os.environ[variable], variable
    for key, value in flags.items():
        if value is not None:
            yield key, value, flag(key)


def _refuse_unknown_variables() -> None:
    """Check that each `BRIDGE_` variable is a choice of some command, because a typo would go unnoticed."""
    classes = tuple(Config.__subclasses__())
    known = {ENVIRONMENT_PREFIX + name.upper() for cls in classes for name in cls.names()} | NO_CHOICES
    for variable, value in os.environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and value and variable not in known:
            raise _unknown(variable.removeprefix(ENVIRONMENT_PREFIX).lower(), value, variable, classes)


def _from_toml(path: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text()) if path else {}
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"no file {path}", hint="--config takes a TOML file") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="--config takes a TOML file") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply", hint="remove the brackets that no choice needs") from error
    except ValueError as error:  # not TOML, not UTF-8, or an integer of too many digits
        raise UsageError(f"{path} is not valid TOML{reason_of(error)}", hint="fix the line that it names") from error


def own_names(classes: Iterable[type[Config]]) -> dict[str, str]:
    """Map every accepted name of a choice of `classes` to Bridge's own name for it."""
    names: dict[str, str] = {}
    for cls in classes:
        for name, key in cls.names().items():
            is_ours = name == key or name in cls.choices()[key].synonyms
            names.setdefault(name, name if is_ours else key)
    return names


def _unknown(name: str, value: Any, origin: str, classes: tuple[type[Config], ...]) -> UsageError:
    is_variable = origin.startswith(ENVIRONMENT_PREFIX)
    if isinstance(value, Mapping):
        return UsageError(f"{origin}: there is no such table", hint=_right_table(name, value, classes))
    near = nearest(name.replace("-", "_"), own_names(classes))
    hint = hint_for(name)
    if not hint and near:
        suggested = ENVIRONMENT_PREFIX + near.upper() if is_variable else near
        hint = f"did you mean {suggested}?"
    return UsageError(f"{origin}: there is no such choice", hint=hint or "see --help for every choice")


def _right_table(name: str, table: Mapping[str, Any], classes: tuple[type[Config], ...]) -> str:
    """Return where the choices in an unknown TOML table belong."""
    tables = [field for cls in classes for field in cls.model_fields if _section(cls, field)]
    for key in table:
        for cls in classes:
            if (known := cls.field_of(key)) is not None:
                *section, _ = cls.choices()[known].path
                if section:
                    return f"{key} belongs in [{section[0]}] or, like every choice, above all tables"
                return f"{key} belongs above all tables"
    near = nearest(name, {table: table for table in tables})
    if near:
        return f"did you mean [{near}]?"
    return f"the tables are {', '.join(dict.fromkeys(tables))}"


def _fault(fault: Any, keys: Mapping[tuple[str, ...], str], origins: Mapping[str, str]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ").partition("\nhint: ")[0]
    key = keys.get(tuple(fault["loc"]))
    if key is None:
        return message
    if fault["type"] == "missing":
        return f"{flag(key)} is missing"
    message = message.removeprefix("Input ").replace("should", "must", 1).partition(", unable")[0]
    return f"{origins.get(key, flag(key))}: {message}, found {described(fault['input'], 200)}"
