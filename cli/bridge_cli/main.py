"""The `bridge` command: its subcommands, each imported only when it runs, and how errors are reported."""

import contextlib
import importlib
import importlib.util
import inspect
import re
import resource
import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from bridge import __version__
from bridge.errors import BridgeError, IncompatibleVersionError
from bridge_cli import command_line, console, signals

INVALID = re.compile(
    r"Invalid value for '(?P<flag>[^']+)'.*?: (?:Value error, |Input )?(?P<problem>.+?)(?:, unable to .*|\.)?",
    re.DOTALL,
)
"""Typer's message about a value; the problem is worded by pydantic."""
REPORT = "this is a bug in Bridge: please report the lines above, with the command that you ran"

COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": (
        "bridge_cli.demo:demo",
        "Train a tiny model in place on a running vLLM, and prove that there is one copy.",
    ),
    "init": (
        "bridge_cli.init:init",
        "Write a configuration file that explains every choice, and a task to start from.",
    ),
    "run": ("bridge_cli.run:run", "Serve a model, train it and stop the server; restart it if it dies or hangs."),
    "distill": ("bridge_cli.distill:distill", "Train a model to predict what a teacher predicts, on its own samples."),
    "serve-vllm": ("bridge_cli.serve_vllm:serve", "Start vLLM so that a trainer can share its weights."),
    "train": ("bridge_cli.train:train", "Train a model on a server that is already running, or on several."),
    "tinker": (
        "bridge_cli.tinker:tinker",
        "Answer the tinker client: its scripts train this model, on one copy of the weights.",
    ),
    "env": ("bridge_cli.env:env", "Feed an Atropos API with rollouts of an environment."),
    "verify": ("bridge_cli.verify:verify", "Prove that a running server and a trainer share one copy of the weights."),
    "restore": ("bridge_cli.restore:restore", "Load a checkpoint into the weights of a running server, in place."),
    "export": ("bridge_cli.export:export", "Write a checkpoint as a model folder that transformers and vLLM can load."),
    "plan": ("bridge_cli.plan:plan", "Print the command for the most precise setup that fits on a GPU."),
    "report": (
        "bridge_cli.report:report",
        "Write an HTML page with the curves and sample completions of a run, or compare several.",
    ),
    "doctor": (
        "bridge_cli.doctor:doctor",
        "Check software, hardware, environment and server, and say how to fix faults.",
    ),
}
"""Name -> its function, and the first line of that function's docstring."""

MOST_DESCRIPTORS = 65_535
PARSING = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}
"""How every command parses its flags: `--learning_rate` means `--learning-rate`."""
MARKUP: Any = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}


class PlainTypes(TyperCommand if TYPE_CHECKING else object):  # type: ignore[misc]
    """Shows --help, the shell completion switches and positional arguments without a Python type."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if parameter.name in {"help", "install_completion", "show_completion"}:
                parameter.metavar = ""
            elif parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None  # noqa: ARG005  typer's name
        return parameters


class Command(PlainTypes, TyperCommand):
    """One command."""


class Group(PlainTypes, TyperGroup):
    """All commands."""


class LazyCommand(TyperCommand):
    """Stands for a command in help texts and completions, and imports it when it is called."""

    def __init__(self, name: str, function: str, help: str) -> None:  # noqa: A002  typer's name
        super().__init__(name, help=help)
        self._function = function

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module, _, function = self._function.partition(":")
        app = typer.Typer(add_completion=False, **MARKUP)
        command = getattr(importlib.import_module(module), function)
        app.command(self.name, cls=Command, help=_unwrapped(command.__doc__), context_settings=PARSING)(command)
        return typer.main.get_command(app).make_context(info_name, args, parent, **extra)


def _unwrapped(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line, so that it wraps at the terminal's width."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


app = typer.Typer(cls=Group, context_settings=PARSING, **MARKUP)


@app.callback(invoke_without_command=True)
def bridge(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and exit.")] = False,
) -> None:
    """One copy of the weights: vLLM generates with it while a trainer updates it in place.

    Start with: bridge demo
    """
    if version:
        console.data(f"bridge {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.get_help()  # typer prints it


def main() -> None:
    """Run the command line of this process and exit."""
    sys.excepthook = report_bug
    _raise_descriptor_limit()
    signals.leave(signals.prepare().finish(answer(sys.argv[1:])))


def _raise_descriptor_limit() -> None:
    """Allow as many open files as vLLM does: a run's agents may open many connections, and 1024 is a common limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid raising the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def answer(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; user mistakes are reported as an error and a hint."""
    command_line.ARGUMENTS.set(tuple(arguments))
    group: Any = typer.main.get_command(app)
    group.commands |= {name: LazyCommand(name, *known) for name, known in COMMANDS.items()}
    try:
        with console.printing_logs():
            code = group.main(list(arguments), prog_name="bridge", standalone_mode=False)
    except BridgeError as error:
        console.error(error.message, error.hint)
        return error.exit_code
    except ModuleNotFoundError as error:
        if missing := _missing_package(error):
            console.error(
                f"Python cannot find {missing}, a package that Bridge needs: {sys.executable} has only some of them",
                "in Bridge's folder, run make setup, or pip install -e . with this Python;"
                " bridge doctor lists the rest",
            )
        elif broken := _broken_package():
            console.error(broken.message, broken.hint)
        else:
            raise
        return IncompatibleVersionError.exit_code
    except TyperException as error:
        console.error(*_usage(error))
        return error.exit_code
    if code == signals.INTERRUPTED:
        console.note("interrupted")
    return code if isinstance(code, int) else 0


def _missing_package(error: ModuleNotFoundError) -> str | None:
    """Return the third-party package that is not installed; None if the missing module is part of an installed one."""
    package = (error.name or "").partition(".")[0]
    is_ours = package.startswith("bridge")
    return None if is_ours or not package or importlib.util.find_spec(package) else package


def _broken_package() -> IncompatibleVersionError | None:
    """Return the error about a package that cannot be imported, for which transformers blames its own modules."""
    from bridge.processes import start_checks

    try:
        start_checks.check_software("auto")
    except IncompatibleVersionError as error:
        return error
    return None


def _usage(error: TyperException) -> tuple[str, str]:
    """Return the message and the hint for a command line that cannot be parsed."""
    from bridge.config import declaration
    from bridge_cli.options import stray_hint, switch_hint

    context = getattr(error, "ctx", None)
    named = [
        name for name in command_line.ARGUMENTS.get()[:1] if name in COMMANDS
    ]  # a flag without its value has no context
    command = context.command_path if context else " ".join(("bridge", *named))
    flag = getattr(error, "option_name", None)
    if flag is None or not hasattr(error, "possibilities"):
        message = error.format_message()
        if stray := _stray(message, getattr(context, "command", None)):
            return f"unexpected argument {stray}", stray_hint(stray)
        if "does not take a value" in message:
            value = next(
                (given.partition("=")[2] for given in command_line.ARGUMENTS.get() if given.startswith(f"{flag}=")), ""
            )
            return f"{flag} does not take a value, found {value!r}", switch_hint(str(flag), value)
        if invalid := INVALID.fullmatch(message):
            return f"{invalid['flag']}: {invalid['problem'].replace('should', 'must', 1)}", f"{command} --help"
        return message[0].lower() + message[1:], f"{command} --help"
    if hint := declaration.hint_for(flag):
        return f"no such flag: {flag}", hint
    if near := _near_flag(flag, getattr(context, "command", None)):
        return f"no such flag: {flag}", f"did you mean {near}?"
    passes_on = "; vLLM's own flags go after --" if command.endswith((" serve-vllm", " run")) else ""
    return f"no such flag: {flag}", f"{command} --help{passes_on}"


def _near_flag(wrong: str, command: Any) -> str | None:
    """Return the flag of `command` most similar to `wrong`, never one of its aliases; None if none is similar."""
    from bridge.config import declaration
    from bridge.config.choices import Config, flag, own_names

    ours = own_names(Config.__subclasses__())
    flags = [name for option in getattr(command, "params", ()) for name in option.opts if name.startswith("--")]
    keys = {name: name.removeprefix("--").replace("-", "_") for name in flags}
    return declaration.nearest(wrong, {name: flag(ours[key]) if key in ours else name for name, key in keys.items()})


def _stray(message: str, command: Any) -> str | None:
    """Return the positional argument that click's `message` refuses, if `command` has --model, the likely meaning."""
    refused = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((\S+).*\)", message, re.DOTALL)
    takes_model = any("--model" in option.opts for option in getattr(command, "params", ()))
    return refused[1] if refused and takes_model else None


def report_bug(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if kind is not KeyboardInterrupt:  # Ctrl-C before the command began, or while its result was reported
        sys.__excepthook__(kind, error, trace)
        console.note(REPORT)
