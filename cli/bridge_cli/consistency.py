"""What must be equal on all hosts of one run, and what all must see: compared once, before anything is started.

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

Facts = Mapping[str, str]
"""What must be equal, by its name in messages."""
HOST = "host"
OWN = {
    "run_dir", "save_path", "resume", "restarts", "rendezvous", "port", "host", "vllm_port", "vllm_host", "server_url",
    "vllm_config_path",
}  # fmt: skip
"""Choices that may differ: those of the first host count, or each has its own."""
HINT = "install the same versions, and start the same command with the same files on each host"
LONGEST = 60
"""Characters of a value in the message."""


def check(ranks: "Ranks", configs: Sequence[Config], vllm_flags: Sequence[str]) -> None:
    """Compare all hosts with the first one; called by all ranks.

    Raises:
        UsageError: one differs.
    """
    first, *others = ranks.run_and_gather(lambda: facts(configs, vllm_flags))
    if differing := next(filter(None, (difference(first, other) for other in others)), None):
        raise UsageError(differing, hint=HINT)


def check_shared(ranks: "Ranks", folder: Path) -> None:
    """Check that every host sees `folder`, from which all resume.

    Raises:
        UsageError: one does not.
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
            f"{lacking[0]} does not see {folder} of {probes[0][0]}: all hosts resume from the checkpoints there",
            hint="--save-path in a folder that all hosts share, such as on NFS",
        )


def facts(configs: Sequence[Config], vllm_flags: Sequence[str]) -> Facts:
    """Return what must be equal on all hosts, the most general first."""
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
    """Return the first difference in one line; None if there is none."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name != HOST and ours.get(name) != theirs.get(name):
            here, there = (_short(facts.get(name, "nothing")) for facts in (ours, theirs))
            return f"the hosts differ in {name}: {here} on {ours[HOST]}, {there} on {theirs.get(HOST, 'another')}"
    return None


def _files(choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a digest of each file that a choice names."""
    for name in filter(None, (choices["model_name"], choices["reference_model"])):
        weights: Any = sorted((path.name, path.stat().st_size) for path in Path(name).glob("*.safetensors"))
        described = json.dumps([model.read(name), weights], default=str, sort_keys=True)
        yield f"the files of {name}", _digest(described.encode())
    rewarded = [name for name, _ in rewards.split(choices["reward"] or "")]
    code = [name.rpartition(":")[0] for name in (choices["environment"], choices["loss"], *rewarded)]
    for file in map(paths.expanded, filter(None, dict.fromkeys([*code, choices["data"], choices["eval_data"]]))):
        if paths.is_file(file):
            yield f"the file {file}", _digest(file.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
