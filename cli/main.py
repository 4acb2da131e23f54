"""The `bridge` command: which commands there are, and how every one of them may fail.

Not covered: what the commands do (one file each).
"""

import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from bridge import __version__
from bridge.config import borrowed
from bridge.errors import BridgeError
from cli import console, ending, signals
from cli.compare import compare
from cli.demo import demo
from cli.doctor import doctor
from cli.env import env
from cli.plan import plan
from cli.report.command import report
from cli.restore import restore
from cli.run import run
from cli.serve import serve
from cli.train import train
from cli.verify import verify

INTERRUPTED = 130
REPORT = "this is a bug in Bridge: please report the lines above, with the command that you gave"


class PlainHelp(TyperCommand if TYPE_CHECKING else object):  # type: ignore[misc]
    """Shows --help without a type."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the --help option."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


class Command(PlainHelp, TyperCommand):
    """One command."""


class Group(PlainHelp, TyperGroup):
    """All of them."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options, those of shell completion without a type, too."""
        options = super().get_params(ctx)
        for option in options:
            if option.name in {"install_completion", "show_completion"}:
                option.metavar = ""
        return options


PARSING = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}
"""How every command reads its flags: `--learning_rate`, as others write it, is `--learning-rate`."""
app = typer.Typer(cls=Group, context_settings=PARSING, rich_markup_mode="rich", pretty_exceptions_enable=False)
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "compare": compare,
    "run": run,
    "serve-vllm": serve,
    "train": train,
    "env": env,
    "verify": verify,
    "restore": restore,
    "plan": plan,
    "report": report,
    "doctor": doctor,
}
for name, function in COMMANDS.items():
    app.command(name, cls=Command, context_settings=PARSING)(function)


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
    sys.excepthook = _report_bug
    signals.prepare()
    sys.exit(answer(sys.argv[1:]))


def answer(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; a mistake of the user's is told in one line and a hint."""
    ending.GIVEN.set(tuple(arguments))
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="bridge", standalone_mode=False)
    except BridgeError as error:
        console.fault(error.message, error.remedy)
        return error.exit_code
    except TyperException as error:
        console.fault(*_usage(error))
        return error.exit_code
    if code == INTERRUPTED:
        console.note("interrupted")
    return code if isinstance(code, int) else 0


def _usage(error: TyperException) -> tuple[str, str]:
    """Return the message and the hint for a command line that cannot be parsed."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "bridge"
    help_hint = f"{command} --help"
    flag = getattr(error, "option_name", None)
    if flag is None or not hasattr(error, "possibilities"):
        message = error.format_message()
        return message[0].lower() + message[1:], help_hint
    if hint := borrowed.hint(flag):
        return f"no such flag: {flag}", hint
    near = sorted(error.possibilities or ())
    if near:
        return f"no such flag: {flag}", f"did you mean {' or '.join(near)}?"
    takes_more = command.endswith((" serve-vllm", " run"))
    return f"no such flag: {flag}", f"{help_hint}{'; vLLM' + chr(39) + 's own flags go after --' if takes_more else ''}"


def _report_bug(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    console.note(REPORT)
