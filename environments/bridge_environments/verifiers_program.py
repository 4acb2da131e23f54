"""The other end of `environments/bridge_environments/packages.py`, run by the Python that verifiers is installed for.

It loads one environment, lists its tasks and runs them, each as one episode, for the requests that come over the
connection with the descriptor `sys.argv[1]`: JSON objects, answered one by one. It ends when that is closed.

May import the standard library and verifiers alone: there is no Bridge in its Python.
Source: verifiers 0.4 `verifiers/v1/serve/server.py`, whose env server builds tasks and runs episodes the same way.
"""

import asyncio
import contextlib
import copy
import itertools
import json
import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NO_CODE = "null"
"""The harness of an agent that has none of its own: it calls the task's tools, and runs nothing that a model writes."""
ENDPOINT = '{"client": {"type": "eval", "base_url": "http://127.0.0.1:9001/v1"}, "model": "MODEL"}'
"""An agent's own model, as `--env-args` gives it."""
NO_KEY = "BRIDGE_HAS_NO_KEY"
"""A variable that is never set: the endpoint takes any key."""


class Refused(Exception):  # noqa: N818  the message is all that matters
    """An error that whoever started the program can fix."""


class Host:
    """One environment of verifiers."""

    def __init__(self, config: Mapping[str, Any], held_out: Mapping[str, Any] | None) -> None:
        from verifiers.v1.utils import loaders

        resolved = _resolved(config)
        self._seat = _seat(resolved)
        self._env = loaders.load_environment(resolved)
        self._tasksets = [self._env.taskset]
        if held_out is not None:
            tasks = {**config["taskset"], **held_out}
            self._tasksets.append(loaders.load_taskset(_resolved({**config, "taskset": tasks}).taskset))
        self._passes: dict[int, Iterator[Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._serving: Any = None
        self._loop.run_until_complete(_prepared(resolved))

    def tasks(self, number: int, count: int, held_out: bool) -> list[dict[str, Any]]:
        """Return the next tasks of the pass `number`, which begins with its first request; fewer at its end."""
        tasks = self._passes.setdefault(number, iter(self._tasksets[held_out]))
        listed = [_listed(task) for task in itertools.islice(tasks, count)]
        if len(listed) < count:
            del self._passes[number]
        return listed

    def run(self, task: Mapping[str, Any], base_url: str) -> dict[str, float]:
        """Run one episode against an OpenAI-compatible endpoint; return its weighted rewards."""
        return self._loop.run_until_complete(self._run(task, base_url))

    async def _run(self, data: Mapping[str, Any], base_url: str) -> dict[str, float]:
        import verifiers.v1 as vf

        if self._serving is None:  # shared tools and the interception server live from here on
            self._serving = self._env.serving()
            await self._serving.__aenter__()
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self._env.config.taskset.task)
        context = vf.ModelContext(model="bridge", client=vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY))
        episode = await self._env.run_episode(task, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise Refused(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        traces = [trace for trace in episode.traces if trace.agent.name == self._seat]
        if len(traces) != 1:
            raise Refused(f"it ran its agent {self._seat} {len(traces)} times in one episode, expected once")
        return {name: reward.value for name, reward in traces[0].rewards.items() if reward is not None}


def _resolved(config: Mapping[str, Any]) -> Any:
    """Return the configuration of an environment; what it leaves open runs on this machine and executes no code."""
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.retries import RetryConfig
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils import loaders

    try:
        resolved = loaders.resolve_env_config(copy.deepcopy(dict(config)))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False)]
        raise Refused("; ".join(faults)) from error
    changes: dict[str, Any] = {}
    for name, agent in agent_config_fields(resolved).items():
        ident = loaders.default_harness_id(resolved.taskset.id)
        ident = NO_CODE if ident == "bash" else ident
        harness = agent.harness or loaders.harness_config_type(ident).model_validate({"id": ident})
        change: dict[str, Any] = {"harness": harness, "retries": RetryConfig()}  # a failed attempt would be trained on
        if "runtime" not in agent.model_fields_set and not loaders.harness_class(harness.id).EXECUTES_CODE:
            change["runtime"] = SubprocessConfig()
        changes[name] = agent.model_copy(update=change)
    return resolved.model_copy(update=changes)


async def _prepared(config: Any) -> None:
    """Install what the agents on this machine run, which may take longer than a turn may."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
    from verifiers.v1.utils import loaders

    for agent in agent_config_fields(config).values():
        if isinstance(agent.runtime, SubprocessConfig):
            async with provision_runtime(agent.runtime) as runtime:
                await loaders.load_harness(agent.harness).setup(runtime)


def _seat(config: Any) -> str:
    """Return the name of the agent that is trained: the only one without an endpoint of its own."""
    from verifiers.v1.configs.agent import agent_config_fields

    open_: list[str] = [name for name, agent in agent_config_fields(config).items() if agent.client is None]
    if len(open_) != 1:
        raise Refused(
            f"{len(open_)} of its agents ({', '.join(open_)}) use the trained model, expected one; give others an"
            ' endpoint: {"' + (open_[-1] if open_ else "judge") + f'": {ENDPOINT}' + "}"
        )
    return open_[0]


def _listed(task: Any) -> dict[str, Any]:
    data = task.data
    return {"prompt": data.prompt_text or data.name or f"task {data.idx}", "task": data.model_dump(mode="json")}


def answered(host: "Host | None", method: str, given: Mapping[str, Any]) -> tuple["Host | None", dict[str, Any]]:
    """Return the host after a request, and the answer."""
    try:
        if host is None:
            return Host(**given), {"result": None}
        return host, {"result": getattr(host, method)(**given)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything, and even call sys.exit
        is_refused = isinstance(error, Refused)
        message = str(error) if is_refused else f"{type(error).__name__}: {error}"
        return host, {"error": " ".join(message.split())[:500] or type(error).__name__, "refused": is_refused}


def main() -> None:
    """Answer requests until the other end closes the socket, whatever runs then."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

    def end_with_the_other() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        os._exit(0)

    threading.Thread(target=end_with_the_other, daemon=True).start()
    host = None
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(connection.recv_bytes())
            host, answer = answered(host, request["method"], request["given"])
            connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
