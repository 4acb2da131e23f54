"""Names that TRL and verl give to choices of ours, read from `borrowed.toml`."""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def _by_name(table: dict[str, list[str]]) -> dict[str, str]:
    return {name: meaning for meaning, names in table.items() for name in names}


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SERVE_ALIASES = _by_name(_TABLES["serve"])
"""Another name -> the choice of `bridge serve-vllm` that is the same."""
ROLLOUT_ALIASES = _by_name(_TABLES["rollouts"])
"""The same for every command that samples rollouts."""
TRAIN_ALIASES = ROLLOUT_ALIASES | _by_name(_TABLES["train"])
"""The same for a training run."""
HINTS = _by_name(_TABLES["hints"])
"""Another name, of something that is not the same or not there -> what to do."""

COUNT_UPDATES = {"training_steps": "max_steps", "save_interval": "save_steps", "eval_interval": "eval_steps"}
"""Choice that counts batches -> TRL's name of it, which counts optimizer steps."""


def misleading(names: Mapping[str, str], get: Callable[[str], Any]) -> Iterator[tuple[str, str, str]]:
    """Yield key, reason and remedy for each borrowed name that, with the other choices, means something else here.

    `names` has the name under which each choice was made, and `get` returns a choice by its key.
    """
    for key, name in COUNT_UPDATES.items():
        if names.get(key) == name and (updates := get("updates_per_batch") * get("passes_per_batch")) > 1:
            ours = f"--{key.replace('_', '-')}"
            reason = f"TRL counts optimizer steps, {ours} counts batches of {updates} optimizer steps"
            yield key, reason, f"{ours} {math.ceil(get(key) / updates)}"
    if names.get("clip_high") == "epsilon_high" and get("loss") == "cispo":
        bound = get("clip_high")
        reason = f"with cispo TRL clips the weight at {bound:g}, --clip-high {bound:g} would clip it at {1 + bound:g}"
        yield "clip_high", reason, f"--clip-high {bound - 1:g}" if bound > 1 else "--clip-high is the bound minus 1"


def hint(name: str) -> str | None:
    """Return what to do instead of what is not ours, given by name, by flag or by verl's path; None: no idea."""
    return HINTS.get(name.lstrip("-").replace("-", "_").rpartition(".")[2])
