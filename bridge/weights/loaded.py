"""A model in the trainer's own memory, for the modes that do not attach to the server's.

Not covered: attaching (`attach.py`), language models inside larger models, quantized weights.
"""

import time

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from bridge.core import host_memory, paths
from bridge.core.paths import ADAPTER_CONFIG
from bridge.errors import UnsupportedModelError, UsageError, beside_adapter, first_line, own_head
from bridge.weights import rope, skeleton
from bridge.weights.attach import OpenedModel, leave_core_to_server
from bridge.weights.model_folder import first_names, no_progress_bar, state

GIB = 2**30
REPLACE_MODEL = "download or copy the model again"
DTYPES = {"bfloat16", "float32"}
"""Dtypes that can be trained. float16 would need loss scaling: its largest number is 65,504."""


def load(
    model: str,
    *,
    device: str,
    dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
    server_class: str = "",
    hint: str = "",
) -> OpenedModel:
    """Load `model` onto `device`: `auto`, `cpu`, `cuda` or `cuda:1`.

    `dtype` defaults to the one in the model's configuration, or else float32. RoPE frequencies match those
    of a server whose longest sequence has `max_model_len` tokens (None: unknown) and that runs the model as
    `server_class`. `hint` is the hint of the error if memory is too small; the default suits modes with a second copy.
    """
    empty = skeleton.build(model, torch.float32)
    rope.follow_server(empty, max_model_len, server_class=server_class)  # raises before anything is loaded
    dtype = _checked_dtype(model, dtype)
    target = _device(device)
    needed = sum(tensor.numel() for tensor in state(empty).values()) * dtype.itemsize
    free = free_bytes(target)
    if free < needed:
        raise _no_room(model, target, needed, free, hint)
    start = time.perf_counter()
    try:
        whole = from_pretrained(model, dtype).to(target).eval()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _no_room(model, target, needed, free_bytes(target), hint) from error
    tied = {name: first for name, first in first_names(empty).items() if name != first}
    for name, first in tied.items():
        if whole.get_parameter(name) is not whole.get_parameter(first):
            raise own_head(name, first)
    rope.follow_server(whole, max_model_len, server_class=server_class)
    return OpenedModel(
        model=whole,
        device=target,
        lr_factors={name: 1.0 for name, _ in whole.named_parameters()},
        open_s=time.perf_counter() - start,
        weight_bytes=needed,
    )


def refuse_several_parts(model: str, config: PretrainedConfig) -> None:
    """Refuse a model whose language model is one of several parts: the trainer cannot load such a model itself."""
    if config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"{model} is a {config.model_type}, whose language model is one of several parts",
            hint="train it with --mode shared_vllm, which leaves the other parts unchanged, and without --kl-coef",
        )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host_memory.left_bytes()


def _checked_dtype(model: str, dtype: torch.dtype | None) -> torch.dtype:
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    refuse_several_parts(model, config)
    chosen: torch.dtype = dtype or config.dtype or torch.float32
    name = str(chosen).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{model} is in {name}, expected {' or '.join(sorted(DTYPES))}: its gradients would overflow",
            hint="convert it to bfloat16: transformers loads it with dtype='bfloat16' and save_pretrained writes it",
        )
    return chosen


def _device(name: str) -> torch.device:
    wanted = name
    if name == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return leave_core_to_server()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(wanted if ":" in wanted else f"{wanted}:0")
    if device.index >= num_gpus:
        raise UsageError(
            f"--trainer-device {name}: this process sees {num_gpus} GPUs",
            hint="--trainer-device cpu, or another number" if num_gpus else "--trainer-device cpu",
        )
    if device.index:
        torch.cuda.set_device(device)  # the device that the fence synchronizes
    return device


def _no_room(model: str, device: torch.device, needed: int, free: int, hint: str) -> UsageError:
    elsewhere = "a different --trainer-device, a lower --gpu-memory-utilization" if device.type == "cuda" else ""
    return UsageError(
        f"the weights of {model} need {needed / GIB:.3g} GiB on {device}, where {free / GIB:.3g} GiB are free",
        hint=hint or f"{elsewhere or 'a smaller model'}, or --mode shared_vllm, which needs no second copy",
    )


def from_pretrained(model: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load all weights of `model`, also those around its language model, into host memory; `auto` keeps its dtype."""
    if paths.is_file(paths.expanded(model) / ADAPTER_CONFIG):
        error = beside_adapter(ADAPTER_CONFIG)
        raise UnsupportedModelError(f"{model}: {error.message}", hint=error.hint)
    loaded: PreTrainedModel
    try:
        config = skeleton.configuration(model)
        with no_progress_bar():
            loaded, report = skeleton.auto_class(config).from_pretrained(
                model, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"the weights of {model} cannot be loaded: {first_line(error)}", hint=REPLACE_MODEL) from error
    if mismatched := sorted(report["mismatched_keys"]):  # transformers fills them with random numbers
        name, stored, expected = mismatched[0]
        raise UsageError(
            f"{model}: {name} has shape {tuple(stored)} in its files, but its configuration expects {tuple(expected)}",
            hint=f"correct its config.json, or {REPLACE_MODEL}",
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise UsageError(f"{model} lacks {len(missing)} of its parameters, the first: {missing[0]}", hint=REPLACE_MODEL)
    return loaded
