"""The program that `packages.py` starts with the Python in which verifiers is installed.

It loads one environment, lists its tasks, and runs each task as one episode. Requests are JSON objects from the
connection with the descriptor `sys.argv[1]`, answered one at a time. The program exits when the connection is closed.

May import only the standard library and verifiers, because Bridge is not installed in that Python.
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
"""The default harness of an agent: it calls the task's tools, but executes no code that a model writes."""
ENDPOINT = '{"client": {"type": "eval", "base_url": "http://127.0.0.1:9001/v1"}, "model": "MODEL"}'
"""Example of an agent with its own model, in the form of `--env-args`."""
NO_KEY = "BRIDGE_HAS_NO_KEY"
"""Name of a variable that is never set, because the endpoint accepts any key."""


class Refused(Exception):  # noqa: N818  the message is all that matters
    """An error that the user can fix by changing a setting."""


class Host:
    """One environment of verifiers."""

    def __init__(self, config: Mapping[str, Any], held_out: Mapping[str, Any] | None) -> None:
        from verifiers.v1.utils import loaders

        resolved = _resolved(config)
        self._trained_agent = _trained_agent(resolved)
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
        """Return the next `count` tasks of the pass `number`, fewer at its end; the first request starts the pass."""
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

        if self._serving is None:  # starts shared tools and the interception server
            self._serving = self._env.serving()
            await self._serving.__aenter__()
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self._env.config.taskset.task)
        context = vf.ModelContext(model="bridge", client=vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY))
        episode = await self._env.run_episode(task, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise Refused(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        traces = [trace for trace in episode.traces if trace.agent.name == self._trained_agent]
        if len(traces) != 1:
            raise Refused(f"it ran its agent {self._trained_agent} {len(traces)} times in one episode, expected once")
        return {name: reward.value for name, reward in traces[0].rewards.items() if reward is not None}


def _resolved(config: Mapping[str, Any]) -> Any:
    """Return an environment's configuration; by default, agents run on this machine and execute no code."""
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
        change: dict[str, Any] = {"harness": harness, "retries": RetryConfig()}  # retried turns would be trained on
        if "runtime" not in agent.model_fields_set and not loaders.harness_class(harness.id).EXECUTES_CODE:
            change["runtime"] = SubprocessConfig()
        changes[name] = agent.model_copy(update=change)
    return resolved.model_copy(update=changes)


async def _prepared(config: Any) -> None:
    """Install the harnesses of local agents in advance, because this may take longer than a turn's time limit."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
    from verifiers.v1.utils import loaders

    for agent in agent_config_fields(config).values():
        if isinstance(agent.runtime, SubprocessConfig):
            async with provision_runtime(agent.runtime) as runtime:
                await loaders.load_harness(agent.harness).setup(runtime)


def _trained_agent(config: Any) -> str:
    """Return the name of the agent in training, the only one without its own endpoint."""
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
    """Answer a request; return the host, which the first request creates, and the answer."""
    try:
        if host is None:
            return Host(**given), {"result": None}
        return host, {"result": getattr(host, method)(**given)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything, and even call sys.exit
        is_refused = isinstance(error, Refused)
        message = str(error) if is_refused else f"{type(error).__name__}: {error}"
        return host, {"error": " ".join(message.split())[:500] or type(error).__name__, "refused": is_refused}


def main() -> None:
    """Answer requests until the other end closes the connection; exit then, even in the middle of an episode."""
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
