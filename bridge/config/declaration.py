"""How a choice is declared: once, for the help, the docs, `bridge init`, `--resume` and every refusal."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from bridge.core import paths
from bridge.errors import UsageError

HINTS: Mapping[str, str] = {
    name: meaning
    for meaning, names in tomllib.loads(Path(__file__).with_name("borrowed.toml").read_text()).items()
    for name in names
}
"""Another system's name for something that differs or does not exist in Bridge -> what to do."""
NEAR = 0.8
"""Least similarity, from 0 to 1, at which a known name is suggested for a wrong one; lower ones are mostly guesses."""

Only = tuple[str, tuple[str, ...]]
"""The key of another choice, and the values of it with which a choice has an effect."""


class Choice(NamedTuple):
    """A choice's place in a configuration, and its declaration, to which its section adds defaults."""

    path: tuple[str, ...]
    """Section, if it is in one, and field."""
    info: FieldInfo
    """Type, default and description."""
    panel: str = ""
    """Panel of the help text; empty: the first one."""
    position: int = 0
    """Position in the panel, among choices in the order of their declaration."""
    only: Only | None = None
    """What it depends on, if it has no effect by itself."""
    synonyms: tuple[str, ...] = ()
    """Its other names in the help text."""
    borrowed: tuple[str, ...] = ()
    """TRL's and verl's names for exactly the same thing, which work as well."""
    counts_updates: str = ""
    """The borrowed name that counts optimizer steps, whereas this choice counts batches; empty: there is none."""
    identifies: bool = False
    """Whether `--resume` looks for a run with the same value."""
    is_path: bool = False
    """Whether its text may begin with a path: to a model's folder, or to a file with problems or code."""


def declare(default: Any = ..., **declared: Any) -> Any:
    """Declare a field; `declared` has fields of `Choice` and arguments of pydantic's `Field`."""
    about = {name: declared.pop(name) for name in Choice._fields if name in declared}
    return Field(default, json_schema_extra=about, **declared)


class Section(BaseModel):
    """The choices of one concern, frozen; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    prefix: ClassVar[str] = ""
    """Prefix of the fields' keys: `alpha` of a section with the prefix `lora_` has the key `lora_alpha`."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Field -> its key, if the key is not the prefix and the field's name."""
    caller_reports: ClassVar[bool] = False
    """Whether the caller reports a wrong choice, with its origin: a flag, a file or a variable."""
    panel: ClassVar[str] = ""
    common: ClassVar[Mapping[str, Any]] = {}
    """Fields of `Choice` that the section declares for all its fields."""

    def __init_subclass__(cls, *, prefix: str = "", renamed: Mapping[str, str] | None = None, **common: Any) -> None:
        super().__init_subclass__()
        cls.prefix = prefix
        cls.renamed = renamed or {}
        cls.panel = common.get("panel", "")
        cls.common = common

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert into what nobody means: `true` into 1, and an empty path into `.`."""
        field = cls.model_fields[str(info.field_name)]
        kinds = {field.annotation, *get_args(field.annotation)}
        if isinstance(value, bool) and bool not in kinds and not kinds.isdisjoint({int, float}):
            raise ValueError("must be a number, not true or false")
        is_path = Path in kinds or "is_path" in _about(field)
        if value == "" and is_path and type(None) in kinds:
            raise ValueError("must not be empty")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _expand_home(cls, value: Any, info: ValidationInfo) -> Any:
        """Expand a leading `~`: a shell does that for `--run-dir ~/x`, but not for `--run-dir=~/x` or in TOML."""
        is_path = isinstance(value, Path) or "is_path" in _about(cls.model_fields[str(info.field_name)])
        return type(value)(paths.expanded(value)) if is_path and str(value).startswith("~") else value

    if not TYPE_CHECKING:  # otherwise type checkers would lose the types of the fields

        def __init__(self, **choices):
            try:
                super().__init__(**choices)
            except ValidationError as error:
                if self.caller_reports:
                    raise
                raise _in_one_line(type(self), error.errors()[0]) from error

        __init__.__pydantic_base_init__ = True  # pydantic builds the sections of a configuration without calling it

    @classmethod
    def key(cls, field: str) -> str:
        """Return the flat name of a field."""
        return cls.renamed.get(field, cls.prefix + field)

    @classmethod
    def declared(cls, *sections: str) -> dict[str, Choice]:
        """Return the choices of this section by key; `sections` is the section's path in a configuration."""
        return {
            cls.key(name): Choice((*sections, name), info, **{**cls.common, **_about(info)})
            for name, info in cls.model_fields.items()
        }


def hint_for(name: str) -> str | None:
    """Return the hint for a name, flag or verl path that is not a choice of Bridge; None if there is none."""
    return HINTS.get(name.lstrip("-").replace("-", "_").rpartition(".")[2])


def nearest(wrong: str, names: Mapping[str, str]) -> str | None:
    """Return Bridge's name for the known name that is most similar to `wrong`; None if none is similar.

    `names` maps every known name, including those of other systems, to Bridge's name. A name with the same letters in
    another order comes first.
    """
    near = difflib.get_close_matches(wrong, names, n=3, cutoff=NEAR)
    near.sort(key=lambda name: sorted(name) != sorted(wrong))
    return names[near[0]] if near else None


def _about(info: FieldInfo) -> dict[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _in_one_line(cls: type[Section], fault: Any) -> UsageError:
    """Return a one-line error for a wrong choice in Python code, such as `SamplingConfig(max_tokens=5)`."""
    name = str(fault["loc"][0]) if fault["loc"] else ""
    known = list(cls.model_fields)
    if fault["type"] == "extra_forbidden":
        others = {
            other: field for field, info in cls.model_fields.items() for other in _about(info).get("borrowed", ())
        }
        near = nearest(name, {**others, **{field: field for field in known}})
        hint = f"did you mean {near}?" if near else f"the choices are {', '.join(known)}"
        return UsageError(f"{cls.__name__} has no choice {name!r}", hint=hint)
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return UsageError(
        f"{cls.__name__}: {name} {message.replace('should', 'must', 1)}, found {fault['input']!r}",
        hint=f"help(bridge.{cls.__name__}) has every choice and its default",
    )
