"""`bridge run --ray`: Ray places the run on `--hosts` nodes of a cluster and starts the same command on each.

Servers and ranks are children of that command, not Ray's. A lost node ends the run everywhere; with `--restarts` it is
placed again.

Source: Ray's documentation on placement groups, actors and their fault tolerance (2.10 to 2.60).
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.config.choices import ENVIRONMENT_PREFIX
from bridge.core.address import free_port
from bridge.errors import RankError, UsageError
from bridge.processes import children
from bridge_cli import command_line, console

LIMIT_S = 600.0
"""Longest wait for nodes, which an autoscaling cluster may have to start first."""
END_LIMIT_S = 60.0
PROGRAM = sys.executable, "-P", "-c", "from bridge_cli.main import main; main()"


class Host:
    """The actor on one node; Ray logs its output and forwards it to the driver's console."""

    def __init__(self) -> None:
        self._child: children.Child | None = None

    def address(self) -> str:
        import ray

        host = ray.util.get_node_ip_address()
        return f"[{host}]:{free_port(host)}" if ":" in host else f"{host}:{free_port(host)}"

    def run(self, argv: Sequence[str], environment: dict[str, str], folder: str) -> int:
        """Run the command, in `folder` if this node has that folder, and return the exit code."""
        os.chdir(folder if Path(folder).is_dir() else ".")
        child = children.start(argv, os.environ | environment, Path("/proc/self/fd/1"))
        self._child = child
        try:
            while (code := child.exit_code()) is None:
                time.sleep(children.POLL_S)
            return code
        finally:
            children.stop(child)

    def interrupt(self) -> None:
        if self._child is not None and self._child.is_alive():
            os.kill(self._child.process.pid, signal.SIGINT)


def run(hosts: int, restarts: int, num_gpus: int, device: str, *, program: Sequence[str] = PROGRAM) -> int:
    """Run this process's command on the nodes of a cluster, and return the first nonzero exit code, or 0.

    The run reserves `num_gpus` GPUs per node, unless `device` is `cpu`, or `auto` in a cluster without GPUs.

    Raises:
        UsageError: Ray is not installed, no cluster is running, or it has too few nodes.
        RankError: a node was lost more often than --restarts.
    """
    try:
        import ray

        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="error")
    except ImportError as error:
        raise UsageError("--ray: Ray is not installed here", hint="pip install ray, on every node") from error
    except ConnectionError as error:
        hint = "start one (ray start --head, and ray start --address on the other nodes), or set RAY_ADDRESS"
        raise UsageError("--ray: no Ray cluster is running here", hint=hint) from error
    try:
        has_gpus = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        arguments = [argument for argument in command_line.ARGUMENTS.get() if argument != "--ray"]
        for left in reversed(range(restarts + 1)):
            argv = [*program, *command_line.with_choices(arguments, {"restarts": "0"}, resume=False)]
            codes = _placed(ray, hosts, num_gpus * has_gpus, argv)
            if RankError.exit_code not in codes:
                return next((code for code in codes if code), 0)
            if left:
                console.note(f"a host was lost; restarting from the newest checkpoint, {left} restarts left")
                arguments = command_line.with_choices(arguments, {})
        raise RankError("a host was lost", hint="continue with --resume; its output is above, and in Ray's logs")
    finally:
        ray.shutdown()


def _placed(ray: Any, num_hosts: int, num_gpus: int, argv: list[str]) -> list[int]:
    """Run the command once on every host, and return the exit codes."""
    resources = {"CPU": 1} | ({"GPU": num_gpus} if num_gpus else {})
    group = ray.util.placement_group([resources] * num_hosts, strategy="STRICT_SPREAD")
    try:
        with console.waiting(f"waiting for {num_hosts} nodes with {resources} each"):
            if not group.wait(LIMIT_S):
                raise UsageError(
                    f"--ray: the cluster did not free {num_hosts} nodes with {resources} each within {LIMIT_S:.0f} s",
                    hint="check `ray status`, or choose smaller --hosts and --gpus",
                )
        make = ray.remote(num_cpus=1, num_gpus=num_gpus, max_concurrency=2)(Host)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        hosts = [make.options(scheduling_strategy=strategy(group, index)).remote() for index in range(num_hosts)]
        if num_hosts > 1:
            argv = command_line.with_choices(argv, {"rendezvous": ray.get(hosts[0].address.remote())}, resume=False)
        variables = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
        running = [host.run.remote(argv, variables, str(Path.cwd())) for host in hosts]
        try:
            return [_code(ray, code) for code in running]
        except KeyboardInterrupt:
            for host in hosts:
                host.interrupt.remote()
            ray.wait(running, num_returns=len(running), timeout=END_LIMIT_S)
            raise
    finally:
        ray.util.remove_placement_group(group)  # kills the actors; each actor kills its command


def _code(ray: Any, running: Any) -> int:
    try:
        return int(ray.get(running))
    except ray.exceptions.RayActorError:
        return RankError.exit_code
