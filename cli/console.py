"""What people read goes to stderr, with nothing in it that acts on a terminal; what programs read goes to stdout.

Not covered: what is said (each command), and the help texts (typer).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cli.visible import cleaned

if TYPE_CHECKING:
    from cli.live import View

people = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""rich leaves colours out where stderr is no terminal or NO_COLOR is set."""

STATUS_STYLES = {"PASS": "bold green", "WARN": "bold yellow", "FAIL": "bold red", "SKIP": "dim"}

_view: "View | None" = None
"""What stands at the bottom of the terminal, and prints lines above itself."""


@contextlib.contextmanager
def shared_with(view: "View") -> Iterator[None]:
    """Leave the terminal to `view`: what is noted and waited for is handed to it."""
    global _view  # noqa: PLW0603 - there is one terminal
    _view = view
    try:
        yield
    finally:
        _view = None


def note(text: str, *, style: str = "") -> None:
    """Tell a person something."""
    line = Text(cleaned(text), style=style)
    if _view is None:
        people.print(line)
    else:
        _view.say(line)


def verdict(status: str, text: str) -> None:
    """Print one line that opens with PASS, WARN, FAIL or SKIP."""
    people.print(Text.assemble((f"{status:4}", STATUS_STYLES[status]), "  ", cleaned(text)))


def fault(message: str, hint: str) -> None:
    """Print `error: ...`, an empty line and `hint: ...`."""
    people.print(Text.assemble(("error: ", "bold red"), cleaned(message)))
    people.print()
    people.print(Text.assemble(("hint: ", "bold cyan"), cleaned(hint)))


def data(line: str) -> None:
    """Print one line for a program, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show that we wait for `what`; the yielded function replaces the detail behind it.

    On a terminal it is one moving line; elsewhere `what` is printed once and the details are left out.
    """
    what = cleaned(what)
    if (view := _view) is not None:
        view.wait_for(what)
        try:
            yield lambda detail: view.wait_for(f"{what}  {cleaned(detail)}")
        finally:
            view.wait_for("")
        return
    if not people.is_terminal:
        note(f"{what} ...")
        yield lambda _: None
        return
    with people.status(Text(what), spinner="line") as status:
        yield lambda detail: status.update(Text(f"{what}  {cleaned(detail)}"[: people.width - 4]))
