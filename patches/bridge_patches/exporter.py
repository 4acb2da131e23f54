"""The manifest of a running server: built from its ranks' shards, written once it answers, removed when it stops."""

import asyncio
import atexit
import json
import logging
import math
import secrets
import signal
import socket
import sys
from argparse import Namespace
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

import bridge
from bridge.core.process import ProcessIdentity, boot_id
from bridge.errors import AttachError, BridgeError, UnsupportedModelError
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest, Shard
from bridge.weights import layout, skeleton
from bridge_patches.compatibility import installed_version

PINS = """
vllm.v1.engine.async_llm: AsyncLLM: model_config
vllm.config.model: ModelConfig: max_model_len
"""
logger = logging.getLogger("vllm.bridge")


async def export(engine_client: Any, args: Namespace) -> Manifest:
    """Collect every rank's shard into the manifest of this process, or raise UnsupportedModelError."""
    if engine_client is None:
        raise AttachError("this server has no engine whose weights could be shared", remedy="use bridge serve-vllm")
    shards = []
    for text in await engine_client.collective_rpc("bridge_export"):
        answer = json.loads(text)
        if "error" in answer:
            raise UnsupportedModelError(answer["error"], remedy=answer["remedy"])
        shards.append(Shard.model_validate(answer))
    shards.sort(key=lambda shard: shard.rank)
    layout.check_parts([shard.param_mappings for shard in shards])
    config = engine_client.model_config
    return Manifest(
        shards=tuple(shards),
        model=skeleton.absolute(config.model),
        dtype=str(config.dtype).removeprefix("torch."),
        backend="shared_memory" if shards[0].gpu_uuid is None else "cuda_ipc",
        max_model_len=config.max_model_len,
        tp_degree=len(shards),
        dp_shard_degree=1,
        num_params=sum(math.prod(view.whole or view.shape) for view in shards[0].param_mappings.values()),
        param_names=tuple(sorted(shards[0].param_mappings)),
        shared_weights_enabled=True,
        single_copy_enabled=True,
        host=socket.gethostname(),
        boot_id=boot_id(),
        server=ProcessIdentity.current(),
        url=_own_url(args),
        token=secrets.token_urlsafe(32),
        versions={
            "bridge": bridge.__version__,
            "vllm": installed_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "python": sys.version.partition(" ")[0],
            "fastapi": version("fastapi"),
        },
    )


def _own_url(args: Namespace) -> str:
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    host = "127.0.0.1" if args.host in {None, "", "0.0.0.0"} else args.host  # noqa: S104  compared, not bound
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"


async def write_when_listening(exported: Manifest, path: Path) -> None:
    """Write the manifest once the server answers, and remove it when this process ends; stop it if that fails."""
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:  # noqa: S501  this very server's own
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"{exported.url}/health")).is_success:
                    break
            await asyncio.sleep(0.02)
    try:
        manifests.write(exported, path)
    except BridgeError as error:
        report(error)
        signal.raise_signal(signal.SIGTERM)  # nobody can attach to this server
        return
    atexit.register(manifests.remove_own, path, exported.server)
    logger.info("Bridge: %d parameters can be attached; manifest: %s", len(exported.param_names), path)


def report(error: BridgeError) -> None:
    """Print `error` as the command line does."""
    print(f"error: {error.message}\n\nhint: {error.remedy}", file=sys.stderr)  # noqa: T201  the log's last word
