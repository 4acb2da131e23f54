"""Import vLLM, and then become the server of a command; run by `bridge/processes/preload.py`.

The command lies in a file in memory, whose descriptor is the argument, as soon as stdin ends.

Nothing is decided here: no plugin is called, no port is taken, and no GPU is used before the command is known.
"""

import gc
import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

from bridge.server import discovery

PINS = """
vllm.entrypoints.cli.serve: ServeSubcommand  # imports all of the API server
vllm.v1.engine.core: EngineCoreProc
vllm.v1.worker.gpu_worker: Worker
vllm.v1.worker.cpu_worker: CPUWorker
vllm.platforms: current_platform
"""
MODULES = ("vllm.entrypoints.cli.serve", "vllm.v1.engine.core", "bridge_patches.routes", "bridge_patches.worker")
"""Modules that the API server and its engine, a fork of it, import."""


def main() -> None:
    """Import, wait for the command, and run it; without one this process ends."""
    before = dict(os.environ)
    early = os.memfd_create("output before there is a log")
    _print_to(early)
    is_imported = _import()
    sys.stdin.buffer.read()
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        document = file.read()
    if not document:
        return
    command = json.loads(document)
    log = os.open(command["log"], os.O_WRONLY | os.O_APPEND)
    os.write(log, Path(f"/proc/self/fd/{early}").read_bytes())
    _print_to(log)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    argv = command["argv"]
    environment = command["environment"]
    if not is_imported:  # a second attempt in this process would fail in another way than the first
        os.execve(argv[0], argv, environment)  # noqa: S606
    for name in before.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(dict(environment.items() - before.items()))  # vLLM sets some when it is imported
    discovery.publish_variables(environment)
    sys.argv = argv[argv.index("-m") + 1 :]
    sys.modules.pop(sys.argv[0], None)  # it runs as __main__, as if it had not been imported
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _import() -> bool:
    """Import what the server and its engine use, and leave it out of garbage collection; False if that failed.

    Nothing of it is garbage, but Python would search it again and again: a seventh of the time, or a quarter without
    bytecode. The engine, a fork, does not search it either.
    """
    gc.disable()
    with suppress(Exception):
        for module in MODULES:
            importlib.import_module(module)
        from vllm.platforms import current_platform

        importlib.import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
        gc.freeze()
        gc.enable()
        return True
    return False


def _print_to(descriptor: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


if __name__ == "__main__":
    main()
