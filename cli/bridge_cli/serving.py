"""`bridge.serve`: a server for as long as a `with` block of a program lasts."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.config import ComputeConfig, SamplingConfig, ServeConfig
from bridge.library import attach
from bridge.policy import Policy
from bridge.server.manifest import MANIFEST_NAME
from bridge_cli.serve import free_port, prepare
from bridge_cli.server_process import StartedServer


@contextmanager
def serve(
    model: str | Path,
    *vllm_flags: str,
    sampling: SamplingConfig | None = None,
    compute: ComputeConfig | None = None,
    run_dir: str | Path | None = None,
    **choices: Any,
) -> Iterator[Policy]:
    """Start a server, attach to it, and stop it at the end of the block.

    `choices` are what the flags of `bridge serve-vllm` set, such as `max_model_len=2048`; `vllm_flags` are vLLM's own,
    such as `"--enforce-eager"`; `run_dir` is that of `attach`. The server ends with this process, however that ends.
    Its log is kept after an error.

    Raises:
        UsageError: a choice is unknown or cannot be used, or there is no such model.
        ServerUnreachableError: vLLM does not start; the message has the reason, the hint its log.
        BridgeError: what `bridge.attach` raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="bridge-serve-"))
    given = {"model": str(model), "port": free_port("127.0.0.1"), "vllm_config_path": folder / MANIFEST_NAME}
    try:
        command = prepare(ServeConfig.resolve({**given, **choices}), list(vllm_flags))
    except BaseException:  # there is no log to keep yet
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with (
        StartedServer(command, folder / "server.log").running(),
        attach(command.manifest, sampling=sampling, compute=compute, run_dir=run_dir) as policy,
    ):
        yield policy
    shutil.rmtree(folder, ignore_errors=True)
