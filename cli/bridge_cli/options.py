"""Flags from configurations: each field of a `Config` becomes one flag of a command.

Not covered: what the fields mean (`bridge/config`), and how a wrong flag is reported (`main.py`).
"""

import inspect
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.markup import escape

from bridge.config.choices import Config, flag
from bridge.config.declaration import Choice
from bridge.core import paths
from bridge.errors import UsageError
from bridge_cli import command_line

PANELS = (
    "", "Several GPUs and hosts", "Batch and sampling", "Continuous rollouts", "Problems and rewards", "Atropos",
    "Loss", "Optimizer", "Evaluation and saving", "Mode lora_only", "Mode none", "Memory", "Server",
)  # fmt: skip
"""Panels of the help text, in the order shown; the empty one is typer's own."""

METAVARS: Mapping[Any, str] = {
    int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT", bool: "", tuple[str, ...]: "TEXT",
    dict[str, Any]: "JSON",
}  # fmt: skip
PATHS = ("PATH", "FOLDER", "FILE")
HOME: Mapping[str, Any] = {"parser": paths.expanded}
"""Parses a path and expands `~`, which shells leave alone in `--out=~/x`."""
ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
"""Values that users write after a switch, although it takes none."""
WIDEST_METAVAR = 15
"""Columns; a wider list of choices goes into the help text, so that the flags' names fit into 80 columns."""

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print the results as JSON objects on stdout.")]
TOML = "TOML file with choices; BRIDGE_* variables and flags override it."


def option(flag: str, metavar: str, text: str, **more: Any) -> Any:
    """Return an option that only this command has; `text` explains its default."""
    more = {**HOME, **more} if metavar in PATHS else more
    return typer.Option(flag, metavar=metavar, help=text, show_default=False, show_envvar=False, **more)


def from_config(
    *configs: type[Config], hide: tuple[str, ...] = (), fixed: Mapping[str, str] = types.MappingProxyType({})
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of `configs`, and pass it one resolved configuration per class.

    The command's keyword-only parameters are options that only it has. A field that several classes declare, under its
    name or a synonym, becomes one flag. The fields in `hide` are left out of the help text. `fixed` are values that
    make up the command: another value of such a field is refused.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = {p.name: p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY}

        def run(**given: Any) -> None:
            mine = {name: given.pop(name) for name in own}
            _refuse_stray(mine.get("vllm_flags") or ())
            toml = given.pop("config")
            flags = _merged(given, configs)
            for key, value in fixed.items():
                if flags.setdefault(key, value) != value:
                    raise UsageError(
                        f"{flag(key)} {flags[key]}: bridge {command.__name__} is bridge run {flag(key)} {value}",
                        hint=f"bridge run {flag(key)} {flags[key]}",
                    )
            command(*(cls.resolve(flags, toml, beside=configs) for cls in configs), **mine)

        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        config = _parameter("config", Path, metavar="FILE", help=TOML, **HOME)
        parameters = [*_flags(configs, hide), config, *own.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _refuse_stray(positional: Sequence[str]) -> None:
    """Refuse positional arguments before --, which would be passed on to vLLM as its own flags."""
    given = command_line.ARGUMENTS.get()
    num_passed_on = 0
    if "--" in given:
        num_passed_on = len(given) - given.index("--") - 1
    if stray := positional[: len(positional) - num_passed_on]:
        raise UsageError(f"unexpected argument {stray[0]}", hint=stray_hint(stray[0]))


def stray_hint(stray: str) -> str:
    """Return a hint about what a positional argument probably means: the value of a switch or a flag, or the model."""
    given = command_line.ARGUMENTS.get()
    index = given.index(stray) if stray in given[1:] else 0
    before = given[index - 1] if index else ""
    if before.startswith("--") and stray.lower() in (*ON, *OFF):
        return switch_hint(before, stray)
    if before.startswith("--") and given[index - 2].startswith("--"):
        return f"{given[index - 2]} has no value, so it took {before} for one"
    if not any(argument.partition("=")[0] == "--model" for argument in given):
        return f"did you mean --model {shlex.quote(stray)}?"
    name, equals, value = stray.lstrip("-#").partition("=")
    return (
        f"did you mean --{name} {shlex.quote(value)}?" if equals else "write each value behind its flag, or see --help"
    )


def switch_hint(name: str, value: str) -> str:
    """Return a hint with the form of the switch `name` that means `value`."""
    form = name if value.lower() in ON else f"--no-{name.removeprefix('--')}"
    return f"a switch takes no value, did you mean {form}?"


def _merged(given: Mapping[str, Any], configs: tuple[type[Config], ...]) -> dict[str, Any]:
    """Drop flags that were not given, and refuse two flags that set the same field differently."""
    flags = {key: value for key, value in given.items() if value is not None}
    if flags.pop("single_copy", False):
        flags.setdefault("weight_bridge_mode", "shared_vllm")
    for key in [key for key in flags if key.startswith("no_")]:
        flags[key.removeprefix("no_")] = not flags.pop(key)
    for cls in configs:
        first_given: dict[str, tuple[str, Any]] = {}
        for key, value in flags.items():
            first, before = first_given.setdefault(cls.field_of(key) or key, (key, value))
            if before != value:
                raise UsageError(
                    f"{flag(first)} {before} and {flag(key)} {value} contradict each other: they set the same choice",
                    hint=f"give only one of {flag(first)} and {flag(key)}",
                )
    return flags


def _flags(configs: tuple[type[Config], ...], hide: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    """Yield the flags shown in the help text, panel by panel, then the hidden ones: every other name of a field."""
    shown: dict[str, Choice] = {}
    for cls in configs:
        for name, choice in cls.choices().items():
            if name not in hide and not any(known in shown for known in (name, *_synonyms(name, configs))):
                shown[name] = choice
    for name, choice in sorted(shown.items(), key=lambda item: (PANELS.index(item[1].panel), item[1].position)):
        kind = _kind(choice.info)
        text = _help(name, choice.info, kind, _synonyms(name, configs))
        more = {"metavar": _metavar(kind), "help": text, "show_default": False}
        if values := _values(name, choice.info, kind):
            more["autocompletion"] = _completion(values)
        yield _parameter(name, bool if kind is bool else str, rich_help_panel=choice.panel or None, **more)
    others = {name: cls.choices()[key].info for cls in configs for name, key in cls.names().items()}
    for name in sorted(others.keys() - shown.keys()):
        yield _parameter(name, bool if _kind(others[name]) is bool else str, hidden=True)
    for name, choice in shown.items():
        if _kind(choice.info) is bool:
            yield _parameter(f"no_{name}", bool, hidden=True)
    if "mode" in shown:
        yield _parameter("single_copy", bool, hidden=True)


def _synonyms(name: str, configs: tuple[type[Config], ...]) -> list[str]:
    """Return every other name that any of `configs` has for the field `name`."""
    known = [{key, *choice.synonyms} for cls in configs for key, choice in cls.choices().items()]
    return sorted(set[str]().union(*(names for names in known if name in names)) - {name})


def _parameter(name: str, kind: type, **more: Any) -> inspect.Parameter:
    option = typer.Option(flag(name), **more)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind | None, option])


def _kind(field: FieldInfo) -> Any:
    """Return the type in `type | None`."""
    annotation: Any = field.annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # Union is for a Literal on Python 3.11
        (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    return annotation


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is not Literal:
        return METAVARS[kind]
    choices = "|".join(typing.get_args(kind))
    return choices if len(choices) <= WIDEST_METAVAR else "CHOICE"


def _values(name: str, field: FieldInfo, kind: Any) -> tuple[str, ...]:
    """Return the values that shell completion offers: all of a choice, or those that its description names."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    named = re.findall(r"`(\w+)`", field.description or "") if name in ("loss", "environment") else []
    return tuple(named)


def _completion(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    def beginning(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return beginning


def _help(name: str, field: FieldInfo, kind: Any, synonyms: list[str]) -> str:
    text = re.sub(r"`([^`]+)`", r"[cyan]\1[/]", escape(field.description or ""))
    if _metavar(kind) == "CHOICE":
        text += f" One of {', '.join(typing.get_args(kind))}."
    also = [flag(other) for other in ([f"no_{name}"] if kind is bool else synonyms)]
    text += f" Also {', '.join(also)}." if also else ""
    if field.is_required():
        return text + escape(" [required]")
    if field.default in (None, PydanticUndefined) or "(default:" in text:  # the text explains it
        return text
    default = ("no", "yes")[field.default] if isinstance(field.default, bool) else field.default
    return text + escape(f" [default: {default}]")
