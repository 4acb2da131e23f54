"""The general plugin: vLLM calls `register` in each of its processes, possibly more than once.

vLLM is not imported at the top of this file, because vLLM swallows exceptions raised while a plugin is *loaded*, but
stops at those raised inside the function.
"""

import functools
import multiprocessing
import multiprocessing.connection  # imported early: a fork while the thread below imports it would see it half-imported
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from bridge.core.process import ProcessIdentity
from bridge.server.discovery import SWITCH

PINS = """
vllm.plugins
    DEFAULT_PLUGINS_GROUP = 'vllm.general_plugins'  # the group of Bridge's entry point
    call load_general_plugins()  # in every process
vllm.envs: environment_variables
vllm.entrypoints.cli.main: call main()  # Bridge starts the server with `python -m vllm.entrypoints.cli.main serve`
"""
VARIABLES = (SWITCH, "VLLM_SKIP_WEIGHT_DAEMON")
"""Bridge's environment variables with vLLM's prefix."""
GRACE_S = 5
"""Seconds (an integer) between SIGTERM, which vLLM's processes handle while they serve, and SIGKILL."""
POLL_S = 0.5
"""Seconds between checks that the parent is alive."""

_tied: set[int] = set()
"""Pids for which `end_with_parent` was called; a fork inherits this set, but has a different pid."""


@functools.cache
def register() -> None:
    """Patch vLLM in this process if `VLLM_ENABLE_SHARED_WEIGHTS=1`; later calls do nothing.

    IncompatibleVersionError if the installed vLLM does not fit the patches.
    """
    if os.environ.get(SWITCH, "0").lower() not in {"1", "true"}:
        return
    from bridge_patches import (
        compatibility,
        engine_outputs,
        filter_thresholds,
        loading,
        logprob_kernel,
        placement,
        prefix_cache,
        quantized,
        routed_experts,
        startup,
    )  # fmt: skip

    compatibility.check_installed()
    from vllm import envs

    for name in VARIABLES:  # otherwise vLLM warns about unknown variables at startup
        envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))
    end_with_parent()
    for patched in (
        startup, loading, quantized, placement, prefix_cache, engine_outputs, filter_thresholds, logprob_kernel,
        routed_experts,
    ):  # fmt: skip
        patched.patch()


def end_with_parent() -> None:
    """Exit this process, and those forked from it, when their parents exit; a second call has no effect.

    Symptom: after kill -9 of the API server, EngineCore and the workers keep running for minutes and hold their GPU
    memory, so that a new server does not fit.
    Cause: they notice only when they next use their connection to the API server.
    Why this is safe: a process whose parent has exited serves nobody. No vLLM code is replaced.
    Seen in vLLM 0.26 to 0.33.
    """
    if not _tied:
        # vLLM does not call plugins again in forked processes.
        multiprocessing.util.register_after_fork(end_with_parent, lambda _: end_with_parent())
    parent = multiprocessing.parent_process()
    if parent is not None and os.getpid() not in _tied:
        threading.Thread(target=_end_after, args=(parent,), name="end_with_parent", daemon=True).start()
    _tied.add(os.getpid())


def _end_after(parent: Any) -> None:
    with suppress(ProcessLookupError):
        identity = ProcessIdentity.of(parent.pid)
        while parent.is_alive() and identity.is_alive():  # after a fork, siblings may hold multiprocessing's pipe open
            time.sleep(POLL_S)
    sys.stderr.write(f"bridge: pid {parent.pid}, the parent of this process, has exited: stopping pid {os.getpid()}\n")
    # The kernel's alarm kills the process even if it hangs in the interpreter's exit, where this thread has stopped.
    signal.alarm(GRACE_S + 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
