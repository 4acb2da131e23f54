"""The live view: a run's lines scroll as ever, and below them stands what it is at.

A thread of its own owns the terminal: training hands it lines and figures, and never waits for it.

Not covered: what is shown (`panel.py`) and said (`steps.py`).
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.text import Text

from bridge.core.interrupt import deferred_interrupt
from bridge.run import reporting
from bridge.run.metrics import Evaluation, StepMetrics
from bridge.run.reporting import Phase
from bridge.types import Group
from cli import console, panel
from cli.steps import Lines

PERIOD_S = 0.25
"""The terminal is painted at most this often."""
MOST_REPEATED = 200
"""Lines that are printed again, as far as they fit, when the terminal gets smaller."""
LONGEST_GOODBYE_S = 3.0
"""A terminal that takes nothing any more is given up after this."""


@contextmanager
def reporting_to_people(num_steps: int, opening: str, *, data: Callable[[str], None] | None = None) -> Iterator[Lines]:
    """Report a run of `num_steps` as lines, with a view below them where there is a terminal for it."""
    if not wanted(console.people, os.environ, has_data=data is not None):
        yield Lines(num_steps, opening, data=data)
        return
    view = View(console.people, num_steps, opening, data=data)
    with console.shared_with(view):
        try:
            yield view
        finally:
            with deferred_interrupt():
                view.close()


def wanted(terminal: Console, environment: Mapping[str, str], *, has_data: bool) -> bool:
    """Tell whether `terminal` is one for a person who looks at it; lines of data would tear the view."""
    return (
        terminal.is_interactive
        and not terminal.is_dumb_terminal
        and terminal.file.isatty()
        and terminal.encoding.startswith("utf")
        and not environment.get("CI")
        and not (has_data and sys.stdout.isatty())
    )


class View(Lines):
    """Reports lines, and stands below them."""

    def __init__(
        self,
        terminal: Console,
        num_steps: int,
        opening: str = "",
        *,
        data: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_steps, opening, data=data, width=lambda: terminal.width)
        self._terminal, self._clock = terminal, clock
        self._seen = panel.Seen(num_steps)
        self._lines: deque[Text] = deque()
        """What was said and is not printed yet."""
        self._printed: deque[Text] = deque(maxlen=MOST_REPEATED)
        """The last lines that were printed."""
        self._over = threading.Event()
        self._painter = threading.Thread(target=self._paint, name="live view", daemon=True)

    def say(self, line: Text) -> None:
        """Print `line` above the view, soon; where there is no view (any more), at once."""
        self._lines.append(line)
        if not self._painter.is_alive():
            self._print_lines()

    def wait_for(self, what: str) -> None:
        """Show what is waited for; nothing: the wait is over."""
        self._seen.waiting = what

    def phase(self, name: Phase) -> None:
        """Show what is being done."""
        self._seen.progress = None
        self._seen.phase, self._seen.phase_began = name, self._clock()
        if not self._painter.ident:  # not before: what opens a run may ask a person something
            self._painter.start()

    def progress(self, done: int, total: int) -> None:
        """Show how far it is."""
        self._seen.progress = done, total

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Show and say what the step did."""
        self._seen.steps.append(metrics)
        self._seen.step_ends.append(self._clock())
        self._seen.sample = reporting.sample(groups)
        super().step(metrics, groups)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show and say how the held-out problems were answered."""
        self._seen.evaluations.append(evaluation)
        super().evaluation(evaluation)

    def close(self) -> None:
        """Take the view away; the lines stay."""
        self._over.set()
        if self._painter.ident:
            self._painter.join(LONGEST_GOODBYE_S)
        self._print_lines()

    def __rich__(self) -> Text:
        """Return what stands below the lines now."""
        size = self._terminal.size
        return panel.render(self._seen, now=self._clock(), width=size.width, height=size.height)

    def _paint(self) -> None:
        with suppress(OSError, SystemExit):  # no terminal any more: the next line says so to whoever prints it
            while not self._paint_until_smaller():
                self._begin_screen_again()

    def _paint_until_smaller(self) -> bool:
        """Paint until the view is over, which is True, or the terminal gets smaller."""
        from rich.live import Live

        size = self._terminal.size
        live = Live(self, console=self._terminal, auto_refresh=False, transient=True, redirect_stdout=False)
        with live:
            while not self._over.wait(PERIOD_S):
                now = self._terminal.size
                if now.width < size.width or now.height < size.height:
                    return False
                size = now
                if not self._print_lines():  # which paints the view as well
                    live.refresh()
            self._print_lines()
        return True

    def _begin_screen_again(self) -> None:
        """Clear the screen and print the last lines again: a terminal breaks lines that got too long in its own way."""
        size = self._terminal.size
        room = size.height - len(self.__rich__().split("\n"))
        kept: list[Text] = []
        for line in reversed(self._printed):
            room -= max(1, -(-line.cell_len // size.width))
            if room < 1:
                break
            kept.insert(0, line)
        self._terminal.clear()
        if kept:
            self._terminal.print(Text("\n").join(kept))

    def _print_lines(self) -> bool:
        """Print what was said, all at once; tell whether there was any."""
        said = []
        with suppress(IndexError):  # another thread may take the last one
            while True:
                said.append(self._lines.popleft())
        if said:
            self._printed.extend(said)
            self._terminal.print(Text("\n").join(said))
        return bool(said)
