"""The general plugin: vLLM calls `register` in each of its processes, possibly more than once.

Nothing of vLLM is imported at the top: vLLM swallows an exception raised while a plugin is *loaded*, and stops at one
raised inside the function.
"""

import functools
import multiprocessing
import multiprocessing.connection  # now: a fork while the thread below imports it would leave half of it
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
    DEFAULT_PLUGINS_GROUP = 'vllm.general_plugins'  # our entry point's group
    call load_general_plugins()  # in every process
vllm.envs: environment_variables
vllm.entrypoints.cli.main: call main()  # `python -m vllm.entrypoints.cli.main serve` is the server we start
"""
VARIABLES = (SWITCH, "VLLM_SKIP_WEIGHT_DAEMON")
"""Bridge's environment variables that are named like vLLM's."""
GRACE_S = 5
"""Whole seconds between SIGTERM, which vLLM's processes handle while they serve, and SIGKILL."""
POLL_S = 0.5
"""Seconds between checks that the parent is alive."""

_tied: set[int] = set()
"""Processes for which `end_with_parent` was called; a fork inherits it under another pid."""


@functools.cache
def register() -> None:
    """Patch this process's vLLM, if `VLLM_ENABLE_SHARED_WEIGHTS=1` and it fits; later calls do nothing."""
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

    for name in VARIABLES:  # or vLLM warns at startup that it does not know them
        envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))
    end_with_parent()
    for patched in (
        startup, loading, quantized, placement, prefix_cache, engine_outputs, filter_thresholds, logprob_kernel,
        routed_experts,
    ):  # fmt: skip
        patched.patch()


def end_with_parent() -> None:
    """End this process, and those forked from it, when their parents end; a second call changes nothing.

    Symptom: after kill -9 of the API server, EngineCore and the workers live on for minutes and hold their GPU memory,
    so no other server fits.
    Cause: they notice only when they next use their connection to it.
    Why this is safe: a process whose parent has ended serves no one. Nothing of vLLM is replaced.
    Seen in vLLM 0.26 to 0.33.
    """
    if not _tied:
        multiprocessing.util.register_after_fork(end_with_parent, lambda _: end_with_parent())  # vLLM calls no plugin
    parent = multiprocessing.parent_process()
    if parent is not None and os.getpid() not in _tied:
        threading.Thread(target=_end_after, args=(parent,), name="end_with_parent", daemon=True).start()
    _tied.add(os.getpid())


def _end_after(parent: Any) -> None:
    with suppress(ProcessLookupError):
        identity = ProcessIdentity.of(parent.pid)
        while parent.is_alive() and identity.is_alive():  # after a fork, siblings may hold multiprocessing's pipe open
            time.sleep(POLL_S)
    sys.stderr.write(f"bridge: pid {parent.pid}, which started this process, has ended: ending pid {os.getpid()}\n")
    # The kernel's alarm ends a process even while it hangs in its finalization, where this thread no longer runs.
    signal.alarm(GRACE_S + 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
