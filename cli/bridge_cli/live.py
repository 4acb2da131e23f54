"""The live view of a run: its lines scroll as usual, and a panel stays below them.

A separate thread paints the terminal: training hands it lines and figures, and never waits for it.
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
from bridge_cli import console, panel
from bridge_cli.steps import Lines

PERIOD_S = 0.25
"""Between two paintings of the terminal."""
MOST_REPEATED = 200
"""Lines printed again, as far as they fit, when the terminal gets smaller."""
LONGEST_GOODBYE_S = 3.0
"""A terminal that takes no more output holds up the end of a run for this long."""


@contextmanager
def reporting_to_people(num_steps: int, opening: str, *, data: Callable[[str], None] | None = None) -> Iterator[Lines]:
    """Report a run of `num_steps` in lines, with a view below them on a terminal that can show it."""
    if not wanted(console.people, os.environ, has_data=data is not None):
        yield Lines(num_steps, opening, data=data)
        return
    view = View(console.people, num_steps, opening, data=data)
    with console.shared_with(view.say, view.wait_for):
        try:
            yield view
        finally:
            with deferred_interrupt():
                view.close()


def wanted(terminal: Console, environment: Mapping[str, str], *, has_data: bool) -> bool:
    """Return whether a person looks at `terminal`, and no lines of data on stdout would break the view."""
    return (
        terminal.is_interactive
        and not terminal.is_dumb_terminal
        and terminal.file.isatty()
        and terminal.encoding.startswith("utf")
        and not environment.get("CI")
        and not (has_data and sys.stdout.isatty())
    )


class View(Lines):
    """Reports lines, and a panel below them."""

    def __init__(
        self,
        terminal: Console,
        num_steps: int,
        opening: str = "",
        *,
        data: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_steps, opening, data=data)
        self._terminal, self._clock = terminal, clock
        self._seen = panel.Seen(num_steps)
        self._lines: deque[Text] = deque()
        """Lines that are not printed yet."""
        self._printed: deque[Text] = deque(maxlen=MOST_REPEATED)
        self._over = threading.Event()
        self._painter = threading.Thread(target=self._paint, name="live view", daemon=True)

    def say(self, line: Text) -> None:
        """Print `line` above the panel soon, or at once if there is no panel."""
        self._lines.append(line)
        if not self._painter.is_alive():
            self._print_lines()

    def wait_for(self, what: str) -> None:
        """Show what is awaited; empty: the wait is over."""
        self._seen.waiting = what

    def phase(self, name: Phase) -> None:
        self._seen.progress = None
        self._seen.phase, self._seen.phase_began = name, self._clock()
        if not self._painter.ident:  # not before: what opens a run may ask a person something
            self._painter.start()

    def progress(self, done: int, total: int) -> None:
        self._seen.progress = done, total

    def step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        self._seen.steps.append(metrics)
        self._seen.step_ends.append(self._clock())
        self._seen.sample = reporting.sample(groups)
        self.width = self._terminal.width
        super().step(metrics, groups)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._seen.evaluations.append(evaluation)
        super().evaluation(evaluation)

    def close(self) -> None:
        """Remove the panel; the lines stay."""
        self._over.set()
        if self._painter.ident:
            self._painter.join(LONGEST_GOODBYE_S)
        self._print_lines()

    def __rich__(self) -> Text:
        size = self._terminal.size
        return panel.render(self._seen, now=self._clock(), width=size.width, height=size.height)

    def _paint(self) -> None:
        with suppress(OSError, SystemExit):  # the terminal is gone: whoever prints the next line finds out
            while self._paint_until_smaller():
                self._repeat_lines()

    def _paint_until_smaller(self) -> bool:
        """Paint until the terminal gets smaller (True) or the view is over (False)."""
        from rich.live import Live

        size = self._terminal.size
        with Live(self, console=self._terminal, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            while not self._over.wait(PERIOD_S):
                now = self._terminal.size
                if now.width < size.width or now.height < size.height:
                    return True
                size = now
                if not self._print_lines():  # which paints the panel as well
                    live.refresh()
            self._print_lines()
        return False

    def _repeat_lines(self) -> None:
        """Clear the screen and print the last lines again: terminals wrap lines that got too long in different ways."""
        size = self._terminal.size
        room = size.height - len(self.__rich__().split("\n"))
        kept: deque[Text] = deque()
        for line in reversed(self._printed):
            room -= max(1, -(-line.cell_len // size.width))
            if room < 1:
                break
            kept.appendleft(line)
        self._terminal.clear()
        if kept:
            self._terminal.print(Text("\n").join(kept))

    def _print_lines(self) -> bool:
        """Print the waiting lines in one go, and return whether there were any."""
        waiting = []
        with suppress(IndexError):  # another thread may take the last one
            while True:
                waiting.append(self._lines.popleft())
        if waiting:
            self._printed.extend(waiting)
            self._terminal.print(Text("\n").join(waiting))
        return bool(waiting)
