"""Names that TRL and verl give to choices of ours, read from `borrowed.toml`."""

import tomllib
from pathlib import Path


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


def hint(name: str) -> str | None:
    """Return what to do instead of what is not ours, given by name, by flag or by verl's path; None: no idea."""
    return HINTS.get(name.lstrip("-").replace("-", "_").rpartition(".")[2])
