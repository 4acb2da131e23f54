"""The table of metrics in docs/looking.md; `python -m tests.metrics_table` rewrites it."""

import re
from pathlib import Path

from bridge.checkpoints.metric_table import METRICS, Metric

PAGE = Path(__file__).parents[1] / "docs" / "looking.md"
BEGIN, END = "<!-- metrics, by python -m tests.metrics_table -->\n", "<!-- end of metrics -->\n"


def table() -> str:
    """Return the rows of all metrics, the recorded ones first."""
    head = "| metric | unit shown | curve | |\n|---|---|---|---|\n"
    return head + "".join(map(_row, METRICS.values()))


def _row(metric: Metric) -> str:
    several = "..." if metric.items is not None else ""
    curves = ", ".join(f"`{curve}{several}`" for curve in (metric.curve, metric.held_out) if curve)
    about = metric.about or f"{metric.title}; derived, not recorded."
    return f"| `{metric.name}` | {metric.unit} | {curves} | {about.replace('|', '&#124;')} |\n"


def replaced(page: str) -> str:
    """Return the page with the table between its marks."""
    return re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: table(), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
