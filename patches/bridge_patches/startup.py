"""Start vLLM's engine as a fork of what the API server has imported, and find its compiled graphs again.

Symptom: a start imports the same packages three times: in the API server, in a process that inspects the model's class,
and in the engine, which takes half a minute each where files are slow.
Cause: `vllm serve` spawns them, in case something has initialized CUDA in the API server.
Why a fork is safe: `get_mp_context` chooses `fork` (`vllm_flags.START_METHOD`) only while CUDA is not initialized, and
asks again at each process. On the CPU vLLM spawns its engine whatever is chosen.

Symptom: a server in parts leaves its shared memory behind, hundreds of MiB of names in /dev/shm.
Cause: Python's resource tracker removes the shared memory of processes that were killed. A forked engine starts
another tracker, and vLLM kills it together with the engine.
What is done: the API server starts a tracker before the fork, and the engine uses that one.

Symptom: a server that is restarted from a checkpoint compiles again what it had compiled.
Cause: the path of the model's folder is part of the key of compiled graphs.
Why it may be left out: the model's configuration and its code, which make the graphs, stay parts of the key.

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
        """Inspect the model's class here: a fork of this process has imported it then.

        A class that initializes CUDA makes vLLM spawn its engine.
        """
        return fn() if system_utils.get_mp_context().get_start_method() == "fork" else original(fn)

    @wrap(utils, "get_hash_factors")
    def factors(original: Callable[..., Any], config: Any, ignored_factors: set[str], *args: Any, **kwargs: Any) -> Any:
        is_known = isinstance(config, ModelConfig) and not config.trust_remote_code  # such code is in that folder
        ignored = ignored_factors | {"model"} if is_known else ignored_factors
        return original(config, ignored, *args, **kwargs)

    resource_tracker.ensure_running()
    multiprocessing.util.register_after_fork(leave_parent, lambda leave: leave())


def leave_parent() -> None:
    """Give up what a spawned process would not have: the API server's port, and its pipe for signals.

    The port would stay taken until the last fork has ended, and the API server would take a signal to this process for
    its own.
    """
    signal.set_wakeup_fd(-1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _servers():
        os.dup2(null, descriptor, inheritable=False)  # a closed number could be another file's, and be closed again
    os.close(null)


def _servers() -> Iterator[int]:
    """Yield the descriptors of TCP sockets that are not connected."""
    for descriptor in sorted(sockets()):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # a thread may have closed it
            if one.family in {socket.AF_INET, socket.AF_INET6} and one.type == socket.SOCK_STREAM:
                try:
                    one.getpeername()
                except OSError:
                    yield descriptor
