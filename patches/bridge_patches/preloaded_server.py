"""Import vLLM, then become the server that a command describes; run by `bridge/processes/preload.py`.

The argument is the descriptor of a memfd, which contains the command once stdin is closed.

Until the command is known, no plugin is called, no port is bound, and no GPU is used.
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
"""Modules that the API server and its forked engine import."""


def main() -> None:
    """Import vLLM, wait for the command, and run it; exit if there is none."""
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
    if not is_imported:  # a second attempt in this process would fail differently from the first
        os.execve(argv[0], argv, environment)  # noqa: S606
    for name in before.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(dict(environment.items() - before.items()))  # vLLM sets some variables when it is imported
    discovery.publish_variables(environment)
    sys.argv = argv[argv.index("-m") + 1 :]
    sys.modules.pop(sys.argv[0], None)  # runs as __main__, so it must look as if never imported
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _import() -> bool:
    """Import what the server and its engine use, and exclude it from garbage collection; False if an import failed.

    These objects are never garbage, but scanning them repeatedly would take a seventh of the import time, or a quarter
    without bytecode. The forked engine does not scan them either.
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
