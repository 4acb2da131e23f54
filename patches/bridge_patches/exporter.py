"""Calls from the API server to the workers of all ranks (`worker.py`): shards for the manifest, and single tensors.

The manifest is written once the server answers requests, and removed when the server stops.
"""

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
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
import transformers
from fastapi import HTTPException

import bridge
from bridge.core.process import ProcessIdentity, boot_id
from bridge.errors import AttachError, BridgeError, UnsupportedModelError
from bridge.processes.vllm_flags import HEAD_KEYS
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest, Shard
from bridge.server.protocol import Element, Finiteness
from bridge.weights import layout, skeleton
from bridge_patches.compatibility import installed_version

PINS = """
vllm.v1.engine.async_llm
    AsyncLLM: model_config
    call async AsyncLLM.collective_rpc(method, timeout, args, kwargs)
vllm.config.model: ModelConfig: max_model_len, hf_overrides, hf_config_path, tokenizer
"""
Answer = TypeVar("Answer")
logger = logging.getLogger("vllm.bridge")


async def export(engine_client: Any, args: Namespace) -> Manifest:
    """Collect every rank's shard into this process's manifest; UnsupportedModelError if the model cannot be shared."""
    if engine_client is None:
        raise AttachError("this server has no engine whose weights could be shared", hint="use bridge serve-vllm")
    refuse_other_model(engine_client.model_config)
    answers = [json.loads(text) for text in await engine_client.collective_rpc("bridge_export")]
    if refused := next((answer for answer in answers if "error" in answer), None):
        raise UnsupportedModelError(refused["error"], hint=refused["hint"])
    shards = sorted(map(Shard.model_validate, answers), key=lambda shard: shard.rank)
    layout.check_parts([shard.param_mappings for shard in shards])
    config = engine_client.model_config
    return Manifest(
        **dict(shards[0]),
        other_shards=tuple(shards[1:]),
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


def refuse_other_model(config: Any) -> None:
    """Refuse a server whose model or tokenizer differs from what a trainer finds in the model's folder.

    `bridge/processes/vllm_flags.py` refuses these flags in Bridge's own command; this covers all other ways to start.
    """
    overrides = config.hf_overrides
    is_of_head = isinstance(overrides, dict) and overrides.keys() <= HEAD_KEYS
    given = {
        "--hf-overrides": None if is_of_head else overrides, "--hf-config-path": config.hf_config_path,
        "--tokenizer": config.tokenizer if config.tokenizer != config.model else None,
    }  # fmt: skip
    for flag, value in given.items():
        if value:
            raise UnsupportedModelError(
                f"{flag} {value} applies only to this server: a trainer builds its model and encodes prompts from"
                f" {config.model}",
                hint="put it into the model's folder, or a copy of that folder, which server and trainer both read",
            )


def _own_url(args: Namespace) -> str:
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    host = "127.0.0.1" if args.host in {None, "", "0.0.0.0"} else args.host  # noqa: S104  compared, not bound
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"


async def write_when_listening(exported: Manifest, path: Path) -> None:
    """Write the manifest once the server answers, and remove it at exit; stop the server if writing fails."""
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:  # noqa: S501  this server's own certificate
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
    """Print `error` in the format of the `bridge` command."""
    print(f"error: {error.message}\n\nhint: {error.hint}", file=sys.stderr)  # noqa: T201  the last line of the log


def agreed(answers: Sequence[Answer], what: str) -> Answer:
    """Return the answer that all ranks agree on; AttachError names the first rank that differs."""
    for rank, answer in enumerate(answers):
        if repr(answer) != repr(answers[0]):  # NaN equals NaN here
            raise AttachError(
                f"the ranks disagree about {what}: rank {rank} returned {answer!r:.100}, expected {answers[0]!r:.100}"
                ", as on rank 0",
                hint="restart the server",
            )
    return answers[0]


async def finiteness(engine: Any) -> Finiteness:
    """Check every rank's weights and adapter slots for NaN and infinity."""
    answers = await engine.collective_rpc("bridge_finiteness")
    return Finiteness(
        num_tensors=agreed([count for count, _ in answers], "the number of their tensors"),
        not_finite=tuple(dict.fromkeys(name for _, names in answers for name in names)),
    )


async def digests(engine: Any, part: int, *, quantized: bool = False) -> dict[str, str]:
    """Return the digests of one rank's parameters, or of their FP8 copies; HTTPException if there is no such rank."""
    method = "bridge_quantized_digests" if quantized else "bridge_digests"
    answers: list[dict[str, str]] = await engine.collective_rpc(method)
    if not 0 <= part < len(answers):
        raise HTTPException(404, f"this server has {len(answers)} ranks, and no rank {part}")
    return answers[part]


async def read(engine: Any, elements: Sequence[Element], exported: Manifest) -> tuple[float, ...]:
    """Read single elements; HTTPException if the model does not have them."""
    answers = await engine.collective_rpc("bridge_read", args=(_checked(elements, exported),))
    values = [iter(answer) for answer in answers]
    return tuple(next(values[element.part]) for element in elements)


async def write(engine: Any, elements: Sequence[Element], values: Sequence[float], exported: Manifest) -> None:
    """Set single elements; HTTPException if the model lacks them, or their dtype cannot represent the values."""
    documents = _checked(elements, exported)
    largest = torch.finfo(getattr(torch, exported.dtype)).max
    for value in values:
        if not abs(value) <= largest:  # also true for NaN
            raise HTTPException(422, f"{value} is not a finite {exported.dtype} number, which is the parameters' dtype")
    await engine.collective_rpc("bridge_write", args=(documents, list(values)))


def _checked(elements: Sequence[Element], exported: Manifest) -> list[dict[str, Any]]:
    """Return `elements` in the workers' format, if the model has them."""
    for element in elements:
        if element.part >= len(exported.shards):
            raise HTTPException(422, f"this server has {len(exported.shards)} ranks, and no rank {element.part}")
        handle = exported.shards[element.part].ipc_handles.get(element.parameter)
        if handle is None:
            raise HTTPException(
                404,
                f"{element.parameter[:100]!r} is not a parameter of {exported.model}; expected one of vLLM's own names,"
                " as in the manifest's ipc_handles",
            )
        size = math.prod(handle.shape)
        if element.index >= size:
            raise HTTPException(422, f"{element.parameter} has {size} elements, and none at index {element.index}")
    return [element.model_dump() for element in elements]
