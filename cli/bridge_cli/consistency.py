"""Check, before anything starts, that all hosts of a run have the same configuration and see the same checkpoints.

Not covered: the weights, which are compared once they are served (`bridge/modes/shared_vllm.py`).
"""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bridge
from bridge.checks import model, software
from bridge.config.choices import Config, flag
from bridge.core import paths, redaction
from bridge.errors import UsageError
from bridge_environments import rewards

if TYPE_CHECKING:
    from bridge.ranks.world import Ranks
    from bridge.rollouts.training_rows import TrainingRow

Facts = Mapping[str, str]
"""Name used in messages -> a value that must be equal on all hosts."""
HOST = "host"
OWN = {
    "run_dir", "save_path", "resume", "restarts", "rendezvous", "port", "host", "vllm_port", "vllm_host", "server_url",
    "vllm_config_path",
}  # fmt: skip
"""Choices that may differ between hosts: only the first host's value is used, or each host has its own."""
HINT = "install the same versions, and start the same command with the same files on each host"
LONGEST = 60
"""Maximum number of characters of a value shown in a message."""


def check(ranks: "Ranks", configs: Sequence[Config], vllm_flags: Sequence[str]) -> None:
    """Compare all hosts with the first one; called by all ranks.

    Raises:
        UsageError: a host differs from the first one.
    """
    first, *others = ranks.run_and_gather(lambda: facts(configs, vllm_flags))
    if differing := next(filter(None, (difference(first, other) for other in others)), None):
        raise UsageError(differing, hint=HINT)


def check_shared(ranks: "Ranks", folder: Path) -> None:
    """Check that every host sees `folder`, which holds the checkpoints that all hosts resume from.

    Raises:
        UsageError: a host does not see it.
    """
    probe = folder.absolute() / f".seen-{ranks.run_on_rank_zero(os.getpid)}"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()

    ranks.run_on_rank_zero(make)
    probes = ranks.all_gather_object((socket.gethostname(), probe.exists()))
    if ranks.is_rank_zero:
        probe.unlink()
    if lacking := [host for host, sees in probes if not sees]:
        raise UsageError(
            f"{lacking[0]} does not see {folder} on {probes[0][0]}, but all hosts resume from the checkpoints there",
            hint="set --save-path to a folder that all hosts share, for example on NFS",
        )


def check_rows(ranks: "Ranks", rows: "Sequence[TrainingRow]") -> None:
    """Check that all ranks have read the same rows, of which each trains on its share; called by all ranks.

    Raises:
        UsageError: a rank has other rows than the first one.
    """
    from bridge.rollouts import training_rows

    first, *others = ranks.all_gather_object((socket.gethostname(), training_rows.digest(rows)))
    if differing := next((other for other in others if other[1] != first[1]), None):
        raise UsageError(
            f"the rows to train on differ: {_short(first[1])} on {first[0]}, {_short(differing[1])} on {differing[0]}"
            " (their number, and a digest of their tokens)",
            hint="copy the same file to each host, and start the same command there",
        )


def facts(configs: Sequence[Config], vllm_flags: Sequence[str]) -> Facts:
    """Return the facts that must be equal on all hosts, most general first."""
    choices = {key: config.get(key) for config in configs for key in config.choices()}
    return {
        HOST: socket.gethostname(),
        "the version of Bridge": bridge.__version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        **{f"the version of {name}": metadata.version(name) for name in ("torch", "transformers")},
        "the version of vLLM": " and ".join(map(" ".join, software.installed_vllm().items())),
        **{flag(key): str(value) for key, value in choices.items() if key not in OWN},
        "vLLM's flags": " ".join(redaction.redacted_arguments(vllm_flags)),
        **dict(_files(choices)),
    }


def difference(ours: Facts, theirs: Facts) -> str | None:
    """Return a one-line description of the first difference, or None if the facts are equal."""
    for name in dict.fromkeys([*ours, *theirs]):
        if name == HOST or ours.get(name) == theirs.get(name):
            continue
        here = _short(ours.get(name, "nothing"))
        there = _short(theirs.get(name, "nothing"))
        other = theirs.get(HOST, "another host")
        return f"the hosts differ in {name}: {here} on {ours[HOST]}, {there} on {other}"
    return None


def _files(choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a digest of each file that a choice names."""
    for name in (choices["model_name"], choices["reference_model"]):
        if not name:
            continue
        weights: Any = sorted((path.name, path.stat().st_size) for path in Path(name).glob("*.safetensors"))
        described = json.dumps([model.read(name), weights], default=str, sort_keys=True)
        yield f"the files of {name}", _digest(described.encode())
    rewarded = [name for name, _ in rewards.split(choices["reward"] or "")]
    code = [name.rpartition(":")[0] for name in (choices["environment"], choices["loss"], *rewarded)]
    for name in dict.fromkeys([*code, choices["data"], choices["eval_data"], choices["warm_up_data"]]):
        if not name:
            continue
        file = paths.expanded(name)
        if paths.is_file(file):
            yield f"the file {file}", _digest(file.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
