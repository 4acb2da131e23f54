"""A LoRA adapter inside a model: inserted, trained in place, saved and loaded as by PEFT.

vLLM stores B pre-multiplied by the scaling alpha / r, and computes y = W x + B A x. Bridge does the same: B is stored
scaled, and PEFT's own scaling factor is 1. Saving divides B by the scaling, which gives a standard PEFT adapter.

The matrices may hold a smaller adapter than they have room for (`fill`): of a lower rank, or without some modules. The
rest of A and B is zero. So are its gradients, and therefore AdamW's updates: it stays zero, and is not saved.

A rank that holds a shard of a weight holds the matching shard of its adapter: the same columns of A and the same rows
of B. The saved adapter is always the full one, whatever the number of ranks.

Not covered: how vLLM gets the adapter (`bridge/modes/lora.py`).
Source: LoRA, arXiv 2106.09685; `LoRALayerWeights.optimize` in vLLM's `lora/lora_weights.py`.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.config import LoraConfig
from bridge.core import json_lines
from bridge.core.paths import ADAPTER_CONFIG
from bridge.errors import UsageError
from bridge.ranks.world import ALONE, Ranks
from bridge.weights import experts
from bridge.weights.rank_parts import Cut, Parts
from bridge.weights.stored_tensors import ADAPTER_WEIGHTS, EXPERTS, PROJECTIONS, not_plain, stored_names

NAME = "default"
"""PEFT's name for the adapter."""
NAMES_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate", "shared_expert_gate"})
"""Last name components that PEFT treats as stacked experts or their router, and that of the shared expert's gate, whose
adapter vLLM 0.32 ignores because it uses a different name for the gate."""
ALL_LINEAR = "all-linear"
"""PEFT's keyword for every linear layer except the output head."""


@dataclass(frozen=True)
class Matrices:
    """The adapter of one module."""

    lora_a: nn.Parameter
    """Shape [r, in], or this rank's columns of it; [experts, r, in] for routed experts."""
    lora_b: nn.Parameter
    """Shape [out, r], or this rank's rows of it, multiplied by the scaling; [experts, out, r] for routed experts."""


PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Beginning of a matrix's name in a saved adapter, and the ends of A's and B's."""
TRANSFER_BYTES = 2**26
"""Bytes of a transfer to host memory."""


@dataclass(frozen=True)
class AdapterShape:
    """The part of the matrices that an adapter uses."""

    r: int
    alpha: float
    modules: frozenset[str]
    """Names of the adapted modules."""

    @property
    def scaling(self) -> float:
        """The factor of the adapter's output, by which B is stored multiplied."""
        return self.alpha / self.r


@dataclass(frozen=True)
class AdapterCopy:
    """An adapter as it was at some moment, in host memory, as PEFT stores it."""

    tensors: Mapping[str, Tensor]
    settings: peft.LoraConfig

    @classmethod
    def read(cls, folder: Path) -> "AdapterCopy":
        """Return a saved adapter. UsageError: `folder` contains none that can be read, or not plain LoRA."""
        try:
            tensors = load_file(folder / ADAPTER_WEIGHTS)
            settings = peft.LoraConfig.from_pretrained(str(folder))
            extras = not_plain(json_lines.parsed((folder / ADAPTER_CONFIG).read_text()))
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(
                f"{folder} does not contain a readable adapter: {error}", hint="name the folder of a saved adapter"
            ) from error
        if extras:
            raise UsageError(
                f"the adapter {folder} has {', '.join(extras)}, expected plain LoRA: it would not have the output with"
                " which it was trained",
                hint=_as_plain(settings) if settings.use_rslora else "train this adapter with PEFT instead of Bridge",
            )
        return cls(tensors, settings)

    def sides(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and the unscaled B of each module that is not a stack of experts."""
        return {
            name.removeprefix(PREFIX).removesuffix(A): (tensor, self.tensors[name.removesuffix(A) + B])
            for name, tensor in self.tensors.items()
            if name.endswith(A)
        }

    def save(self, folder: Path) -> None:
        """Write the adapter into `folder` in PEFT's format, which stock vLLM loads, too."""
        save_file(dict(self.tensors), folder / ADAPTER_WEIGHTS, {"format": "pt"})
        self.settings.save_pretrained(str(folder))


class Adapter:
    """The adapter of a model whose other weights are frozen."""

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig,
        *,
        seed: int,
        base_name: str,
        cuts: Sequence[Mapping[str, Cut]] = (),
        tp_group: Ranks = ALONE,
    ) -> None:
        """Insert a new adapter into `model`: A random from `seed`, B zero, both in the model's dtype.

        With tensor parallelism, `cuts` says which share of each parameter each rank holds, and `tp_group` is the group
        of these ranks. Each rank then gets its share of the same adapter.
        """
        names = check_targets(model, lora)
        settings = peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=_all_linear(model) if names == [ALL_LINEAR] else names or DUMMY_TARGET_MODULES,
            task_type="CAUSAL_LM",
        )
        self.max_rank = lora.r
        """Rank that the matrices have room for."""
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            self.peft_model = _inserted(model, settings, lora.target_modules)
            """`model`, wrapped by PEFT. B is stored scaled: use `save` of this class, not PEFT's."""
            if lora.has_experts:
                _adapt_experts(model, self.peft_model.peft_config[NAME], is_whole=not cuts)
        self.peft_model.peft_config[NAME].base_model_name_or_path = base_name
        self.modules: dict[str, Matrices] = {}
        model.eval()  # PEFT inserts modules in training mode; only the adapter's dropout may be active
        for name, module in model.named_modules():
            layer: Any = module
            if hasattr(layer, "lora_A") and NAME in layer.lora_A:
                self.modules[name] = Matrices(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
                if isinstance(layer, LoraLayer):
                    layer.scaling[NAME] = 1.0
                    layer.lora_dropout.train()
        self.shape = AdapterShape(lora.r, lora.alpha, frozenset(self.modules))
        """The adapter that the matrices hold."""
        self.cuts = [_with_adapter(cuts_of_part, self.modules, lora.r) for cuts_of_part in cuts]
        """Each tensor-parallel rank's share of every parameter, by its name in the model with the adapter."""
        self._parts = Parts(cuts=self.cuts, tp_group=tp_group) if cuts else None
        for name in self.lr_factors() if self._parts is not None else ():
            matrix = model.get_parameter(name)
            matrix.data = self._own(name, matrix.detach()).clone(memory_format=torch.contiguous_format)

    def fill(self, shape: AdapterShape, *, seed: int) -> None:
        """Replace the adapter by a new one, in place: A random from `seed`, as PEFT initializes it, and B zero.

        Not for several ranks, and not for routed experts.
        """
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, matrices in self.modules.items():
                matrices.lora_a.zero_()
                matrices.lora_b.zero_()
                if name in shape.modules:
                    drawn = torch.empty(shape.r, matrices.lora_a.shape[1])
                    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
                    matrices.lora_a[: shape.r].copy_(drawn)
        self.shape = shape

    def lr_factors(self) -> dict[str, float]:
        """Return the factor by which each trained parameter is stored scaled, by its name in the model."""
        factors = {"lora_A": 1.0, "lora_B": self.shape.scaling}
        return {
            f"{module}.{matrix}.{NAME}.weight": factor for module in self.modules for matrix, factor in factors.items()
        }

    def num_bytes(self) -> int:
        return sum(m.lora_a.nbytes + m.lora_b.nbytes for m in self.modules.values())

    def save(self, folder: Path) -> None:
        """Write the adapter into `folder` in PEFT's format, which stock vLLM loads, too.

        The other ranks call `send_parts` at the same time.
        """
        self.copied().save(folder)

    def copied(self) -> AdapterCopy:
        """Return a copy of the adapter that the matrices hold. The other ranks call `send_parts` at the same time."""
        tensors = dict[str, Tensor]()
        for name, tensor in _on_host(self._unscaled()):
            names = stored_names(name, tensor.shape)
            tensors |= zip(names, tensor.reshape(-1, *tensor.shape[-2:]).unbind(), strict=True)
        return AdapterCopy(tensors, self._settings())

    def _settings(self) -> peft.LoraConfig:
        """Return PEFT's configuration of the adapter that the matrices hold."""
        settings: peft.LoraConfig = copy.copy(self.peft_model.peft_config[NAME])
        settings.r = self.shape.r
        settings.lora_alpha = self.shape.alpha
        if self.shape.modules != self.modules.keys():
            settings.target_modules = {*self.shape.modules}
        return settings

    def send_parts(self) -> None:
        """Send this rank's parts to the rank that saves; raises the same errors as `save`."""
        for _ in self._unscaled():
            pass

    def load(self, folder: Path) -> None:
        """Copy a saved adapter, or this rank's part of it, into the matrices in place."""
        saved = self.check(folder)
        with torch.no_grad():
            for name, parameter in self._state().items():
                if not self._is_used(name):
                    parameter.zero_()
                    continue
                shape = self._stored_shape(name, parameter)
                stored = torch.stack([saved[key] for key in stored_names(name, shape)]).view(shape)
                whole = _padded(stored, self._shape(name, parameter))
                value = self._own(_name_of(name), whole).to(parameter.device)
                parameter.copy_(value.double() * self.shape.scaling if "lora_B" in name else value)

    def check(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors of a saved adapter; raise UsageError if they do not match this adapter."""
        read = AdapterCopy.read(folder)
        saved, config = dict(read.tensors), read.settings
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        wholes = {
            name: self._stored_shape(name, tensor) for name, tensor in self._state().items() if self._is_used(name)
        }
        expected = {key: shape[-2:] for name, shape in wholes.items() for key in stored_names(name, shape)}
        odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        if odd or config.lora_alpha / config.r != self.shape.scaling:
            raise UsageError(
                f"{folder} contains a different adapter: rank {config.r}, alpha {config.lora_alpha}, {len(odd)} "
                f"matrices differ{f', first: {odd[0]}' if odd else ''}",
                hint=f"use --lora-r {config.r} --lora-alpha {config.lora_alpha} and the --lora-target-modules that it"
                " was trained with",
            )
        return saved

    def _own(self, name: str, whole: Tensor) -> Tensor:
        return whole if self._parts is None else self._parts.own[name].of(whole)

    def _shape(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape) if self._parts is None else self._parts.own[_name_of(key)].shape

    def _is_used(self, key: str) -> bool:
        """Return whether a matrix, by its name in a saved adapter, belongs to the adapter that the matrices hold."""
        return _name_of(key).rpartition(".lora_")[0] in self.shape.modules

    def _stored_shape(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a full matrix of the adapter that the matrices hold."""
        *stack, outputs, inputs = self._shape(key, tensor)
        rank = self.shape.r
        return (*stack, outputs, rank) if "lora_B" in key else (*stack, rank, inputs)

    def _state(self) -> Mapping[str, Tensor]:
        # the default, "auto", would request the model's configuration from the hub at every step
        state: Mapping[str, Tensor] = get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        return state

    def _unscaled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors to save: B unscaled, in a wider dtype unless rescaling restores the same bits."""
        state = self._state()
        parts = self._parts
        if parts is not None:
            parts.check_equal({_name_of(key): tensor for key, tensor in state.items()})
        scaling = self.shape.scaling
        exact = math.frexp(scaling)[0] == 0.5  # a power of two
        for name, parameter in state.items():
            tensor = parameter.detach() if parts is None else parts.whole(_name_of(name), parameter)
            if not self._is_used(name):
                continue
            *_, rows, columns = self._stored_shape(name, parameter)
            tensor = tensor[..., :rows, :columns]
            if "lora_B" in name:
                wider = torch.float64 if tensor.dtype == torch.float32 else torch.float32
                tensor = (tensor.double() / scaling).to(tensor.dtype if exact else wider)
            yield name, tensor


def _on_host(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Copy tensors to host memory, many in one transfer, since a model's adapter has hundreds of small ones."""
    waiting = list[tuple[str, Tensor]]()
    for name, tensor in named:
        waiting.append((name, tensor))
        if sum(other.nbytes for _, other in waiting) >= TRANSFER_BYTES:
            yield from _transferred(waiting)
            waiting = []
    yield from _transferred(waiting)


def _transferred(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for dtype in {tensor.dtype for _, tensor in named}:
        chosen = [(name, tensor) for name, tensor in named if tensor.dtype == dtype]
        joined = torch.cat([tensor.flatten() for _, tensor in chosen])
        host = torch.empty(joined.shape, dtype=dtype, pin_memory=joined.is_cuda)  # pinned: ten times as fast
        pieces = host.copy_(joined).split([tensor.numel() for _, tensor in chosen])
        yield from ((name, piece.view_as(tensor)) for (name, tensor), piece in zip(chosen, pieces, strict=True))


def _with_adapter(base: Mapping[str, Cut], modules: Iterable[str], rank: int) -> dict[str, Cut]:
    """Return a rank's cuts of every parameter of a model with an adapter; `base` has its cuts without the adapter.

    PEFT moves an adapted module's own parameters to its `base_layer`.
    """
    cuts = dict(base)
    for module in modules:
        for leaf in ("weight", "bias"):
            if f"{module}.{leaf}" in base:
                cuts[f"{module}.base_layer.{leaf}"] = cuts.pop(f"{module}.{leaf}")
        (outputs, inputs), (rows, columns) = base[f"{module}.weight"].shape, base[f"{module}.weight"].runs
        cuts[f"{module}.lora_A.{NAME}.weight"] = Cut((rank, inputs), (((0, rank),), columns))
        cuts[f"{module}.lora_B.{NAME}.weight"] = Cut((outputs, rank), (rows, ((0, rank),)))
    return cuts


def _as_plain(settings: peft.LoraConfig) -> str:
    """Return how to write an adapter with a scaling of alpha / sqrt(r) as plain LoRA."""
    alpha = settings.lora_alpha * math.sqrt(settings.r)
    return f'write "use_rslora": false and "lora_alpha": {alpha:.10g} in its {ADAPTER_CONFIG}: the same adapter'


def _padded(stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a matrix of a lower rank in one of `shape`, with zeros in the rest."""
    if stored.shape == shape:
        return stored
    whole = stored.new_zeros(shape)
    whole[..., : stored.shape[-2], : stored.shape[-1]] = stored
    return whole


def _name_of(key: str) -> str:
    """Convert a matrix's name in a saved adapter to its name in the model."""
    return f"{key.removeprefix(PREFIX).removesuffix('weight')}{NAME}.weight"


def _inserted(model: PreTrainedModel, settings: peft.LoraConfig, target_modules: str) -> PeftModel:
    try:
        inserted = get_peft_model(model, settings, autocast_adapter_dtype=False)
        if settings.target_parameters:
            raise ValueError("it adapts stacked experts instead of the layers with these names")
    except ValueError as error:  # for example, a layer name that PEFT uses for the weights of stacked experts
        raise UsageError(
            f"--lora-target-modules {target_modules}: PEFT cannot adapt that: {' '.join(str(error).split())}",
            hint=f"choose only attention layers, or all-linear; choose {EXPERTS} for routed experts",
        ) from error
    return inserted


def _adapt_experts(model: PreTrainedModel, settings: peft.LoraConfig, *, is_whole: bool) -> None:
    """Add an adapter to the routed experts, and name their modules in `settings` so that PEFT can load it."""
    if not is_whole:
        raise UsageError(
            f"--lora-target-modules {EXPERTS} requires a server on one GPU", hint=f"leave out {EXPERTS}, or use one GPU"
        )
    experts.adapt(model, NAME, settings.r)
    others = () if settings.target_modules == DUMMY_TARGET_MODULES else settings.target_modules
    settings.target_modules = {*others, *PROJECTIONS}


def _all_linear(model: PreTrainedModel) -> str | list[str]:
    """Return PEFT's keyword for all linear layers; for a mixture of experts, their full names.

    PEFT 0.21 adapts the stacked experts instead of any linear layer whose name experts used to have, including a shared
    expert's layers. No vLLM slot has the layout of such an adapter.
    """
    if not any("experts" in dict(module.named_children()) for module in model.modules()):
        return ALL_LINEAR
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name.rpartition(".")[2] not in NAMES_OF_EXPERTS
    ]


def check_targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the names of the linear layers that get an adapter.

    Raises:
        UsageError: a name matches no module, or only modules that are not linear, or matches the output head, whose
            logits are computed from its weight only (`bridge/passes/logprobs.py`). PEFT would accept all of these.
    """
    wanted = [name for name in lora.names if name != EXPERTS]
    if wanted == [ALL_LINEAR]:
        return wanted
    head = model.get_output_embeddings()
    linear = {f".{name}": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = [name for name, module in linear.items() if module is not head]
    heads = linear.keys() - layers
    missing = [name for name in wanted if not any(layer.endswith(f".{name}") for layer in linear)]
    of_head = [name for name in wanted if any(layer.endswith(f".{name}") for layer in heads)]
    if not missing and not of_head:
        return wanted
    others = {EXPERTS} if any(name.endswith(f".{EXPERTS}") for name, _ in model.named_modules()) else set()
    names = sorted({layer.rpartition(".")[2] for layer in layers} | others)
    why = "the model has no such linear layers" if missing else "the head gets no adapter, since it is not trained"
    raise UsageError(
        f"--lora-target-modules {','.join(missing or of_head)}: {why}",
        hint=f"choose from {', '.join(names)}, or use all-linear",
    )
