"""Start vLLM's engine as a fork of the API server and its imports, and reuse its compiled graphs.

Symptom: starting imports the same packages three times: in the API server, in a process that inspects the model's
class, and in the engine. Each takes half a minute on slow file systems.
Cause: `vllm serve` spawns these processes, in case CUDA is already initialized in the API server.
Why a fork is safe: `get_mp_context` chooses `fork` (`vllm_flags.START_METHOD`) only while CUDA is not initialized, and
checks again for each process. On the CPU, vLLM always spawns its engine.

Symptom: a tensor-parallel server leaves shared memory behind, hundreds of MiB in /dev/shm.
Cause: Python's resource tracker removes the shared memory of killed processes. A forked engine starts its own tracker,
and vLLM kills it together with the engine.
What is done: the API server starts a tracker before the fork, and the engine uses that one.

Symptom: a server that is restarted from a checkpoint compiles its graphs again.
Cause: the path of the model's folder is part of the key of compiled graphs.
Why it may be left out: the model's configuration and code, which determine the graphs, remain part of the key.

Seen in vLLM 0.26 to 0.33.
"""

import multiprocessing.util
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

from bridge.core.process import sockets
from bridge_patches import wrap

PINS = """
vllm.utils.system_utils: call get_mp_context()
vllm.model_executor.models.registry: replace _run_in_subprocess(fn)
vllm.config.utils: wrap get_hash_factors(config, ignored_factors)
vllm.config.model
    ModelConfig: model, trust_remote_code
    ModelConfig.compute_hash imports vllm.config.utils.get_hash_factors
"""


def patch() -> None:
    from vllm.config import utils
    from vllm.config.model import ModelConfig
    from vllm.model_executor.models import registry
    from vllm.utils import system_utils

    @wrap(registry, "_run_in_subprocess")
    def inspect(original: Callable[..., Any], fn: Callable[[], Any]) -> Any:
        """Inspect the model's class in this process, so that forks of it have already imported the class.

        If the class initializes CUDA, vLLM spawns its engine.
        """
        return fn() if system_utils.get_mp_context().get_start_method() == "fork" else original(fn)

    @wrap(utils, "get_hash_factors")
    def factors(original: Callable[..., Any], config: Any, ignored_factors: set[str], *args: Any, **kwargs: Any) -> Any:
        is_known = isinstance(config, ModelConfig) and not config.trust_remote_code  # custom code is in that folder
        ignored = ignored_factors | {"model"} if is_known else ignored_factors
        return original(config, ignored, *args, **kwargs)

    resource_tracker.ensure_running()
    multiprocessing.util.register_after_fork(leave_parent, lambda leave: leave())


def leave_parent() -> None:
    """Close what a spawned process would not inherit: the API server's port and its signal wakeup pipe.

    Otherwise the port would stay in use until the last fork exits, and the API server would react to signals sent to
    this process.
    """
    signal.set_wakeup_fd(-1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _servers():
        os.dup2(null, descriptor, inheritable=False)  # a closed descriptor could be reused, and be closed again
    os.close(null)


def _servers() -> Iterator[int]:
    """Yield the descriptors of unconnected TCP sockets."""
    for descriptor in sorted(sockets()):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # a thread may have closed it
            if one.family in {socket.AF_INET, socket.AF_INET6} and one.type == socket.SOCK_STREAM:
                try:
                    one.getpeername()
                except OSError:
                    yield descriptor
