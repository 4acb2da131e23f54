"""A LoRA adapter inside a model: put in, trained where it lies, saved and loaded as PEFT does.

vLLM keeps B multiplied by the scaling alpha / r, and computes y = W x + B A x. So do we: B is held multiplied, and
PEFT's own factor is 1. What is saved is divided again: a plain PEFT adapter.

Not covered: how vLLM gets it (`bridge/modes/lora_memory.py`, `bridge/modes/lora_disk.py`).
Source: LoRA, arXiv 2106.09685; `LoRALayerWeights.optimize` in vLLM's `lora/lora_weights.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.weights.adapter_folder import WEIGHTS_NAME

NAME = "default"
"""PEFT's name of the one adapter."""
ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the head."""


@dataclass(frozen=True)
class Matrices:
    """The adapter of one module."""

    lora_a: nn.Parameter
    """Shape [r, in]."""
    lora_b: nn.Parameter
    """Shape [out, r], multiplied by the scaling."""


class Adapter:
    """One adapter in one model, whose other weights are frozen."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        """Put a new adapter into `model`: A random by the seed, B zero, both in the model's dtype.

        Raises:
            UsageError: no module of the model has one of the names, or one that has is no linear layer.
        """
        names = [name.strip() for name in config.lora.target_modules.split(",")]
        chosen: Any = ALL_LINEAR if names == [ALL_LINEAR] else names
        if chosen != ALL_LINEAR:
            _refuse_unmatched(model, names)
        settings = LoraConfig(
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            lora_dropout=config.lora.dropout,
            target_modules=chosen,
            task_type="CAUSAL_LM",
        )
        self.scaling = config.lora.alpha / config.lora.r
        self._peft = _injected(model, settings, config)
        self._peft.peft_config[NAME].base_model_name_or_path = config.model_name
        self.modules = {
            name: Matrices(module.lora_A[NAME].weight, module.lora_B[NAME].weight) for name, module in _layers(model)
        }
        model.eval()  # what PEFT put in came in training mode; of all the model its dropout alone shall be active
        for _, module in _layers(model):
            module.scaling[NAME] = 1.0
            module.lora_dropout.train()

    def lr_factors(self) -> dict[str, float]:
        """Return every trained parameter by its name in the model, with the factor that it is held multiplied by."""
        factors = {"lora_A": 1.0, "lora_B": self.scaling}
        return {
            f"{module}.{matrix}.{NAME}.weight": factor for module in self.modules for matrix, factor in factors.items()
        }

    def num_bytes(self) -> int:
        """Return the size of both matrices of all modules."""
        return sum(m.lora_a.nbytes + m.lora_b.nbytes for m in self.modules.values())

    def save(self, folder: Path) -> None:
        """Write it into `folder` as PEFT and stock vLLM load it."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self._unscaled()}, folder / WEIGHTS_NAME, {"format": "pt"}
        )
        self._peft.peft_config[NAME].save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Copy a saved adapter into the matrices, in place.

        Raises:
            UsageError: it is of another shape, other modules or another scaling; nothing was copied.
        """
        saved = self._read(folder)
        with torch.no_grad():
            for name, parameter in self._state().items():
                value = saved[name].to(parameter.device)
                parameter.copy_(value.double() * self.scaling if "lora_B" in name else value)

    def check(self, folder: Path) -> None:
        """Check that `load` would take it.

        Raises:
            UsageError: as `load` does.
        """
        self._read(folder)

    def _read(self, folder: Path) -> dict[str, Tensor]:
        try:
            saved: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
            config = LoraConfig.from_pretrained(str(folder))
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(
                f"{folder} holds no adapter that can be read: {error}", remedy="name another one"
            ) from error
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in self._state().items()}
        odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        if odd or config.lora_alpha / config.r != self.scaling:
            raise UsageError(
                f"{folder} is another adapter: rank {config.r}, alpha {config.lora_alpha}, {len(odd)} matrices differ"
                f"{f', the first: {odd[0]}' if odd else ''}",
                remedy=f"--lora-r {config.r} --lora-alpha {config.lora_alpha} and the --lora-target-modules it was made"
                " with",
            )
        return saved

    def _state(self) -> Mapping[str, Tensor]:
        # "auto", the default, asks the hub for the model's configuration, and that at every step
        state: Mapping[str, Tensor] = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return state

    def _unscaled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is saved; B in a wider type where its own could not be multiplied back to the very same bits."""
        exact = math.frexp(self.scaling)[0] == 0.5  # a power of two
        for name, tensor in self._state().items():
            if "lora_B" not in name:
                yield name, tensor.detach()
            else:
                yield name, (tensor.detach().double() / self.scaling).to(tensor.dtype if exact else _wider(tensor))


def _injected(model: PreTrainedModel, settings: LoraConfig, config: TrainConfig) -> PeftModel:
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        injected: PeftModel = get_peft_model(model, settings, autocast_adapter_dtype=False)
    return injected


def _refuse_unmatched(model: PreTrainedModel, wanted: list[str]) -> None:
    """Refuse what PEFT would take: one name of several that no module has, and modules that are no linear layers."""
    linear = [f".{name}" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    missing = [name for name in wanted if not any(module.endswith(f".{name}") for module in linear)]
    if missing:
        names = sorted({module.rpartition(".")[2] for module in linear})
        raise UsageError(
            f"--lora-target-modules {','.join(missing)}: the model has no such linear layers",
            remedy=f"choose among {', '.join(names)}, or all-linear",
        )


def _wider(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float32 else torch.float32


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the modules with an adapter, by the names that they have without one."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and NAME in module.lora_A:
            yield name, module
