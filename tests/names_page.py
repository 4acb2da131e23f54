"""docs/names.md, generated from what each choice declares: flags of TRL, verl and Unsloth, and ours.

`python -m tests.names_page` regenerates the page.
"""

from collections.abc import Iterable
from pathlib import Path

from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import flag
from bridge.config.declaration import HINTS

PAGE = Path(__file__).parents[1] / "docs" / "names.md"
INTRODUCTION = """\
# Flags of TRL, verl and Unsloth

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

A command that gets one of these stops, with the text on the right as its hint. They are names of TRL, transformers'
`Trainer`, Unsloth, verl and vLLM. Of one of verl's paths, such as `actor_rollout_ref.rollout.n`, only the last part
counts.

| there | here |
|---|---|
"""


def page() -> str:
    """Return the page of the docs."""
    declared = [*ServeConfig.choices().items(), *TrainConfig.choices().items()]
    same = {key: choice.borrowed for key, choice in declared if choice.borrowed}
    meanings = {meaning: [name for name, other in HINTS.items() if other == meaning] for meaning in HINTS.values()}
    rows = [_row(names, f"`{flag(key)}`") for key, names in same.items()]
    return INTRODUCTION + "".join(rows) + OTHERS + "".join(_row(names, text) for text, names in meanings.items())


def _row(names: Iterable[str], meaning: str) -> str:
    return f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |\n".replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
