"""`bridge verify`: prove on a live server that there is one copy of the weights (`bridge/checks/one_copy_proof.py`)."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bridge.checks import Check, any_failed
from bridge.errors import UsageError
from bridge.server import discovery, manifest
from bridge_cli import console
from bridge_cli.options import Json, option

FAILED_EXIT_CODE = 3
ASK_LIMIT_S = 60.0

PATH = "The manifest (default: the first one in $LOGDIR, the current folder and /tmp/atropos_bridge)."
ManifestPath = Annotated[Path | None, option("--vllm-config-path", "PATH", PATH)]
RunDir = Annotated[
    Path | None, option("--run-dir", "PATH", "Check every server of the live run in this directory, on this host.")
]


def verify(*, vllm_config_path: ManifestPath = None, run_dir: RunDir = None, as_json: Json = False) -> None:
    """Prove that a running server and a trainer share one copy of the weights.

    If no manifest is found, the only running server is used. With --run-dir, all servers of that run on this host are
    checked, and compared with each other. Exits with 3 if a check fails.
    """
    if run_dir is not None:
        if vllm_config_path is not None:
            raise UsageError("--run-dir and --vllm-config-path both choose servers", hint="give only one of them")
        checks = all_proofs(servers_of(run_dir), as_json=as_json)
    else:
        path = discovery.find(vllm_config_path)
        if vllm_config_path is None and path not in manifest.search_path():
            console.note(f"the only running server was started elsewhere: {path}")
        checks = proof(path, as_json=as_json)
    if any_failed(checks):
        raise typer.Exit(FAILED_EXIT_CODE)


def servers_of(run_dir: Path) -> list[Path]:
    """Return the manifests of the servers on this host that the run in `run_dir` trains on.

    Raises:
        UsageError: that run trains on no server of this host.
    """
    from bridge.server.client import BridgeClient

    served = []
    for path, exported in sorted(discovery.running().items()):
        with BridgeClient(exported, timeout_s=ASK_LIMIT_S) as client:
            lease = client.status().lease
        if lease is not None and lease.run == str(run_dir.absolute()):
            served.append(path)
    if not served:
        raise UsageError(
            f"no server on this host is trained by a run in {run_dir}",
            hint="name the directory of a live run, or one server with --vllm-config-path",
        )
    return served


def all_proofs(paths: Sequence[Path], *, as_json: bool) -> list[Check]:
    """Run every check on each server, compare the servers, and return all results."""
    from bridge.checks import one_copy_proof as proofs

    results = []
    for path in paths:
        console.note(f"server of {path}")
        results += proof(path, as_json=as_json)
    return results + (shown([proofs.replicas(paths)], as_json=as_json) if len(paths) > 1 else [])


def proof(path: Path, *, as_json: bool) -> list[Check]:
    """Run every check on the server of the manifest at `path`, print each result at once, and return them all."""
    from bridge.checks import one_copy_proof as proofs

    return shown(proofs.verify(path), as_json=as_json)


def shown(checks: Iterable[Check], *, as_json: bool) -> list[Check]:
    """Print each check at once, for a person and, with `as_json`, for a program too; return them all."""
    results = []
    for check in checks:
        results.append(check)
        console.verdict(check.status, f"{check.name}: {check.found}")
        if check.status in ("FAIL", "WARN"):
            console.note(f"      expected: {check.expected}\n      hint: {check.hint}")
        if as_json:
            console.data(json.dumps(dataclasses.asdict(check)))
    return results
