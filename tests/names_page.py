"""docs/names.md, generated from `bridge/config/borrowed.toml`: flags of TRL and verl, and ours.

`python -m tests.names_page` regenerates the page.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from bridge.config import borrowed
from bridge.config.choices import flag

PAGE = Path(__file__).parents[1] / "docs" / "names.md"
INTRODUCTION = """\
# Flags of TRL and verl

Names that you know from TRL's `GRPOConfig` and from verl work as flags, variables (`BRIDGE_LEARNING_RATE`) and
TOML keys where they mean the same. `max_steps`, `save_steps` and `eval_steps` are refused with several updates per
batch, and `epsilon_high` with `--loss cispo`: there they would mean something else. This page is generated from what
the command line knows.

## The same

| there | here |
|---|---|
"""
OTHERS = """
## Different here, or not there

A command that gets one of these stops, with the text on the right as its hint. Of one of verl's paths, such as
`actor_rollout_ref.rollout.n`, only the last part counts.

| there | here |
|---|---|
"""


def page() -> str:
    """Return the page of the docs."""
    tables = tomllib.loads(Path(borrowed.__file__).with_suffix(".toml").read_text())
    same: dict[str, list[str]] = {}
    for command in ("serve", "rollouts", "train"):
        for choice, names in tables[command].items():
            same[choice] = [*dict.fromkeys([*same.get(choice, []), *names])]
    hints = tables["hints"].items()
    rows = [_row(names, f"`{flag(choice)}`") for choice, names in same.items()]
    return INTRODUCTION + "".join(rows) + OTHERS + "".join(_row(names, meaning) for meaning, names in hints)


def _row(names: Iterable[str], meaning: str) -> str:
    return f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |\n".replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
