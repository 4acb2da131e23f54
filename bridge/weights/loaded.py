"""A model in memory of the trainer's own, for the modes that do not attach to the server's.

Not covered: attaching (`attach.py`), models whose language model is a part of something larger, quantised weights.
"""

import time
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bridge.core import memory
from bridge.errors import UnsupportedModelError, UsageError
from bridge.weights import rope, skeleton
from bridge.weights.attach import leave_a_core
from bridge.weights.model_folder import no_progress_bar

GIB = 2**30
AGAIN = "download or copy the model again"
DTYPES = (torch.bfloat16, torch.float32)
"""What gradients survive in: those of float16 need a scaled loss, and its largest number is 65,504."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A transformers model in memory of its own."""

    model: PreTrainedModel
    """The model, in evaluation mode; its parameters require gradients."""
    device: torch.device
    """Where the weights lie."""
    load_s: float
    """Seconds from the built model to the last loaded parameter."""
    weight_bytes: int
    """Bytes of the weights, a tied parameter once."""


def load(
    model: str,
    *,
    device: str,
    dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
    server_class: str = "",
) -> LoadedModel:
    """Load `model` onto `device`: `auto`, `cpu`, `cuda` or `cuda:1`.

    Its type is `dtype`; None: the one that its configuration names, or float32 where it names none. Its positions are
    those of a server whose longest sequence has `max_model_len` tokens, None: not known, and that runs the model as
    `server_class`, if that is known.

    Raises:
        UsageError: no such model or device, not enough memory, weights that are missing or do not fit, or positions
            that depend on an unknown length.
        UnsupportedModelError: it is quantised, in float16, or no plain causal language model of transformers.
    """
    empty = skeleton.build(model, torch.float32)
    rope.follow_server(empty, max_model_len, server_class=server_class)  # refused before anything is loaded
    dtype = dtype or _own_dtype(model)
    _refuse_unfit(model, dtype)
    place = _device(device)
    needed = sum(parameter.numel() for parameter in empty.parameters()) * dtype.itemsize
    _check_memory(model, place, needed)
    start = time.perf_counter()
    try:
        whole = _from_pretrained(model, dtype).to(place).eval()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _no_room(model, place, needed, free_bytes(place)) from error
    rope.follow_server(whole, max_model_len, server_class=server_class)
    return LoadedModel(model=whole, device=place, load_s=time.perf_counter() - start, weight_bytes=needed)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that `device` would still hand out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory.left_bytes()


def _own_dtype(model: str) -> torch.dtype:
    named: torch.dtype | None = AutoConfig.from_pretrained(model).dtype
    return named or torch.float32


def _refuse_unfit(model: str, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(model)
    if config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"{model} is a {config.model_type}, in which the language model is one part of several",
            remedy="take a plain language model",
        )
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{model} is in {_name(dtype)}, expected {' or '.join(map(_name, DTYPES))}: its gradients would overflow",
            remedy="take it in bfloat16: transformers loads it with dtype='bfloat16' and save_pretrained writes it",
        )


def _device(name: str) -> torch.device:
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if wanted == "cpu":
        return leave_a_core()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(wanted if ":" in wanted else f"{wanted}:0")
    if device.index >= num_gpus:
        raise UsageError(
            f"--trainer-device {name}: this process sees {num_gpus} GPUs",
            remedy="--trainer-device cpu, or another number" if num_gpus else "--trainer-device cpu",
        )
    return device


def _check_memory(model: str, device: torch.device, needed: int) -> None:
    free = free_bytes(device)
    if free < needed:
        raise _no_room(model, device, needed, free)


def _no_room(model: str, device: torch.device, needed: int, free: int) -> UsageError:
    elsewhere = "another --trainer-device, a lower --gpu-memory-utilization" if device.type == "cuda" else ""
    return UsageError(
        f"the weights of {model} need {needed / GIB:.3g} GiB on {device}, where {free / GIB:.3g} GiB are free",
        remedy=f"{elsewhere or 'a smaller model'}, or --mode shared_vllm, which needs no second copy",
    )


def _from_pretrained(model: str, dtype: torch.dtype) -> PreTrainedModel:
    loaded: PreTrainedModel
    try:
        with no_progress_bar():
            loaded, report = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, output_loading_info=True)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"the weights of {model} cannot be loaded: {str(error).strip().partition(chr(10))[0]}", remedy=AGAIN
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers has filled them with random numbers
        raise UsageError(f"{model} lacks {len(missing)} of its parameters, the first: {missing[0]}", remedy=AGAIN)
    return loaded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
