"""A toy server in the calling process: fused and padded weights in a shared-memory file."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import bridge
from bridge.server.manifest import MANIFEST_NAME, LoraSlot, Manifest, Shard, SharedMemoryHandle, View
from bridge.weights import shared_memory
from bridge.weights.model_folder import state
from bridge.weights.stored_tensors import stored_names
from tests.models import tiny, vllm_cuts
from tests.unit.checks_sample import edited, manifest

tqdm.monitor_interval = 0  # transformers' progress bars would leave a thread behind
PADDED_ROWS = 448
FILLER = 7.0
"""Value of the rows that no token owns."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class ToyServer:
    manifest: Manifest
    tensors: dict[str, Tensor]
    """The server's own tensors, by vLLM's names."""
    reference: PreTrainedModel
    """The same model, loaded by transformers into its own memory."""
    slots: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Hugging Face module -> the server's own A and B of all its LoRA slots."""

    def padding_rows(self) -> list[Tensor]:
        return [tensor[tiny.VOCABULARY :] for tensor in self.tensors.values() if len(tensor) == PADDED_ROWS]

    def edited(self, **changes: Any) -> Manifest:
        """The manifest with some fields edited."""
        return edited(self.manifest, **changes)


def serve(config: PretrainedConfig, folder: Path) -> ToyServer:
    tiny.write(config, folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    parts = _layout({name: tensor.detach() for name, tensor in state(reference).items()})
    tensors, handles = _allocate({name: _stack(pieces) for name, pieces in parts.items()})
    views = {}
    for name, pieces in parts.items():
        offset = 0
        for piece, tensor in pieces.items():
            stride = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim()))
            views[piece] = View(parameter=name, offset=offset, shape=tuple(tensor.shape), stride=stride)
            offset += tensor.numel()
    padding = {
        name: (PADDED_ROWS - tiny.VOCABULARY) * tensor.shape[1]
        for name, tensor in tensors.items()
        if len(tensor) == PADDED_ROWS
    }
    exported = manifest(
        model=str(folder), dtype="bfloat16", ipc_handles=handles, param_mappings=views, padding=padding,
        num_params=sum(tensor.numel() for tensor in state(reference).values()), param_names=tuple(sorted(views)),
    )  # fmt: skip
    return ToyServer(exported, tensors, reference.eval())


def attach(exported: Manifest, folder: Path, **choices: Any) -> bridge.Policy:
    """Attach to the server as a program does, with a manifest in `folder`."""
    path = folder / MANIFEST_NAME
    path.write_text(exported.model_dump_json())
    path.chmod(0o600)
    return bridge.attach(path, **choices)


def in_parts(server: ToyServer, num_parts: int) -> Manifest:
    """Return the manifest of a server that holds the same model in parts, with a file for each part."""
    weights = {name: tensor.detach() for name, tensor in state(server.reference).items()}
    cuts = vllm_cuts.cuts(server.reference.config, {name: weight.shape for name, weight in weights.items()}, num_parts)
    shards = []
    for part, cuts_of_part in enumerate(cuts):
        _, handles = _allocate({name: cut.of(weights[name]).contiguous() for name, cut in cuts_of_part.items()})
        views = {
            name: View(
                parameter=name, offset=0, shape=cut.part_shape, stride=handles[name].stride, whole=cut.shape,
                runs=cut.runs,
            )
            for name, cut in cuts_of_part.items()
        }  # fmt: skip
        shards.append(Shard(rank=part, gpu_uuid=None, ipc_handles={**handles}, param_mappings=views, padding={}))
    first, *others = shards
    return server.edited(
        ipc_handles=first.ipc_handles, param_mappings=first.param_mappings, padding={}, other_shards=tuple(others),
        tp_degree=num_parts,
    )  # fmt: skip


def with_slots(server: ToyServer, rank: int, *, num_slots: int = 2, without: str = "-") -> ToyServer:
    """Add slots for adapters up to `rank`, with filler values; none for modules named `without`."""
    whole = {}
    for name, module in server.reference.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", without)):
            whole[f"{name}.a"] = torch.full((num_slots, 1, rank, module.in_features), FILLER, dtype=torch.bfloat16)
            whole[f"{name}.b"] = torch.full((num_slots, 1, module.out_features, rank), FILLER, dtype=torch.bfloat16)
        if name.endswith("experts") and not name.endswith(without):
            whole |= _of_experts(name, module, (num_slots, rank))
    tensors, handles = _allocate(whole)
    names = [name.removesuffix(".a") for name in whole if name.endswith(".a")]
    exported = {name: LoraSlot(lora_a=handles[f"{name}.a"], lora_b=handles[f"{name}.b"]) for name in names}
    slots = {name: (tensors[f"{name}.a"], tensors[f"{name}.b"]) for name in names}
    return replace(server, manifest=server.edited(lora_slots=exported), slots=slots)


def fill_slot(server: ToyServer, slot: int, folder: Path) -> None:
    """Fill a slot with a saved adapter as vLLM does: B times the scaling, with zeros beyond the adapter's rank."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank, scaling = config["r"], config["lora_alpha"] / config["r"]
    stored = load_file(folder / "adapter_model.safetensors")
    for name, (a, b) in server.slots.items():
        for whole in (a, b):
            whole[slot].zero_()
        key = f"base_model.model.{name}.lora_A.weight"
        if (names := stored_names(key, a.shape[1:]))[0] in stored:
            a[slot, :, :rank].copy_(torch.stack([stored[key] for key in names]))
            both = torch.stack([stored[key.replace("lora_A", "lora_B")] for key in names])
            b[slot, ..., :rank].copy_(both.float() * scaling)


def _of_experts(name: str, experts: Any, sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Return slots of vLLM's layout for routed experts."""
    (num_slots, rank), (count, hidden, width) = sizes, experts.down_proj.shape
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    filler = torch.tensor(FILLER, dtype=torch.bfloat16)
    return {
        f"{name}.lora.{projection}.{side}": filler.repeat(num_slots, count, *matrix)
        for projection, (outputs, inputs) in shapes.items()
        for side, matrix in (("a", (rank, inputs)), ("b", (outputs, rank)))
    }


def _layout(weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return, per parameter of vLLM, the Hugging Face parameters in it in order."""
    fused_by = {part: fused for fused, parts in FUSED.items() for part in parts}
    layout: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        *path, module, leaf = name.split(".")
        layout.setdefault(".".join([*path, fused_by.get(module, module), leaf]), {})[name] = tensor
    return layout


def _stack(pieces: dict[str, Tensor]) -> Tensor:
    whole = torch.cat(list(pieces.values()))
    if len(whole) != tiny.VOCABULARY:
        return whole
    return torch.cat([whole, torch.full((PADDED_ROWS - len(whole), whole.shape[1]), FILLER, dtype=whole.dtype)])


def _allocate(whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, SharedMemoryHandle]]:
    starts, end = {}, 0
    for name, tensor in whole.items():
        starts[name] = end
        end += -(-tensor.nbytes // shared_memory.ALIGNMENT_BYTES) * shared_memory.ALIGNMENT_BYTES
    block = shared_memory.allocate(end)
    tensors, handles = {}, {}
    for name, tensor in whole.items():
        start = starts[name] // tensor.element_size()
        tensors[name] = torch.empty(0, dtype=tensor.dtype).set_(block.storage, start, tensor.shape, tensor.stride())
        tensors[name].copy_(tensor)
        handles[name] = SharedMemoryHandle(
            path=block.path, storage_size=end, storage_offset=0, tensor_offset=start,
            shape=tuple(tensor.shape), stride=tensor.stride(), dtype=str(tensor.dtype).removeprefix("torch."),
        )  # fmt: skip
    return tensors, handles
