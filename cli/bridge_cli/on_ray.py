"""`bridge run --ray`: let a Ray cluster place the run: the same `bridge run` on each of `--hosts` nodes.

Ray gives each node's GPUs to one actor, which starts the command there; the hosts then meet as they do without Ray. Ray
starts nothing else: a server and its ranks have to share a host, and stay children of that command. A lost node ends
the run on all, and with `--restarts` it is placed again.

Not covered: a cluster's start, and the same files on all nodes.

Source: Ray's documentation on placement groups, actors and their fault tolerance (2.10 to 2.60).
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.config import ServeConfig, TrainConfig
from bridge.config.choices import ENVIRONMENT_PREFIX, HOSTS_KNOW
from bridge.errors import RankError, UsageError
from bridge_cli import children, console, ending, ranks
from bridge_cli.serve import free_port

LIMIT_S = 600.0
"""Longest wait for nodes: a cluster that grows starts them first."""
END_LIMIT_S = 60.0
"""Longest wait for the hosts to end after Ctrl-C."""
PROGRAM = sys.executable, "-P", "-c", "from bridge_cli.main import main; main()"
OUTPUT = Path("/proc/self/fd/1")
"""An actor's own output, which Ray keeps in its log and prints where the cluster is used."""


class Host:
    """The actor on one node."""

    def __init__(self) -> None:
        self._child: children.Child | None = None

    def address(self) -> str:
        """Return a place on this node where hosts can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        return f"[{host}]:{free_port(host)}" if ":" in host else f"{host}:{free_port(host)}"

    def run(self, program: Sequence[str], arguments: Sequence[str], environment: dict[str, str], folder: str) -> int:
        """Run the command in `folder`, if this node has it, and return its exit code."""
        if Path(folder).is_dir():
            os.chdir(folder)
        child = self._child = children.start([*program, *arguments], os.environ | environment, OUTPUT)
        try:
            while (code := child.exit_code()) is None:
                time.sleep(children.POLL_S)
            return code
        finally:
            children.stop(child)

    def interrupt(self) -> None:
        """Pass on Ctrl-C."""
        if self._child is not None and self._child.is_alive():
            os.kill(self._child.process.pid, signal.SIGINT)


def run(train: TrainConfig, serve: ServeConfig, *, program: Sequence[str] = PROGRAM) -> int:
    """Run this process's command on the nodes of a cluster, and return the exit code of the first host.

    Raises:
        UsageError: Ray is not installed, no cluster runs, or it has too few nodes.
        RankError: a node was lost more often than --restarts.
    """
    if train.rendezvous is not None:
        raise UsageError(
            f"--rendezvous {train.rendezvous}: with --ray the hosts meet where Ray puts them", remedy="leave it out"
        )
    ray = _connected()
    try:
        arguments = [each for each in ending.GIVEN.get() if each != "--ray"]
        for left in reversed(range(train.restarts + 1)):
            codes = _placed(ray, train, serve, program, arguments)
            if RankError.exit_code not in codes and None not in codes:
                return next((code for code in codes if code), 0)
            if left:
                console.note(f"a host was lost; starting again from the newest checkpoint, {left} restarts left")
                arguments = ending.changed(arguments, {})
        raise RankError("a host was lost", remedy="continue with --resume; its output is above, and in Ray's logs")
    finally:
        ray.shutdown()


def _connected() -> Any:
    """Return Ray, connected to the cluster of RAY_ADDRESS, or of this node."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray: Ray is not installed here", remedy="pip install ray, on every node") from error
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="error")
    except ConnectionError as error:
        raise UsageError(
            "--ray: no Ray cluster is running here",
            remedy="start one (ray start --head, and ray start --address on the other nodes), or set RAY_ADDRESS",
        ) from error
    return ray


def _placed(
    ray: Any, train: TrainConfig, serve: ServeConfig, program: Sequence[str], arguments: Sequence[str]
) -> list[int | None]:
    """Run the command once on every host, and return the exit codes; None: the node was lost."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    on_gpus = serve.device == "cuda" or (serve.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    each = {"CPU": 1, **({"GPU": ranks.num_gpus(train, serve)} if on_gpus else {})}
    group = placement_group([each] * train.hosts, strategy="STRICT_SPREAD")
    try:
        with console.waiting(f"waiting for {train.hosts} nodes with {each} each"):
            if not group.wait(LIMIT_S):
                raise UsageError(
                    f"--ray: no {train.hosts} nodes with {each} each became free within {LIMIT_S:.0f} s",
                    remedy="see `ray status`, or choose other --hosts and --gpus",
                )
        make = ray.remote(num_cpus=1, num_gpus=each.get("GPU", 0), max_concurrency=2)(Host)
        places = [PlacementGroupSchedulingStrategy(group, index) for index in range(train.hosts)]
        hosts = [make.options(scheduling_strategy=place).remote() for place in places]
        return _ran(ray, hosts, program, arguments)
    finally:
        remove_placement_group(group)  # ends the actors, and each its command


def _ran(ray: Any, hosts: Sequence[Any], program: Sequence[str], arguments: Sequence[str]) -> list[int | None]:
    given = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
    meet = {"restarts": "0"}
    if len(hosts) > 1:
        given[HOSTS_KNOW] = secrets.token_hex()
        meet["rendezvous"] = ray.get(hosts[0].address.remote())
    line = ending.changed(arguments, meet, resume=False)
    running = [host.run.remote(program, line, given, str(Path.cwd())) for host in hosts]
    try:
        return [_code(ray, each) for each in running]
    except KeyboardInterrupt:
        for host in hosts:
            host.interrupt.remote()
        ray.wait(running, num_returns=len(running), timeout=END_LIMIT_S)
        raise


def _code(ray: Any, running: Any) -> int | None:
    try:
        return int(ray.get(running))
    except ray.exceptions.RayActorError:
        return None
