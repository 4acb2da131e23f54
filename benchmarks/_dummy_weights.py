"""Larger random values for vLLM's dummy weights (`--load-format dummy`), so that router scores choose the experts.

vLLM fills all weights, norms included, with numbers up to 0.001. The scores of a token's experts then differ by only
about 1e-5, so that rounding chooses among them, and log-probabilities barely depend on the choice. Here each matrix is
normally distributed, with a standard deviation of 0.5 / sqrt(inputs), of 1 / sqrt(inputs) for experts, or of 1 for the
embedding, and each norm is about 1 (`_models.spread`). In 24 layers with 128 experts each, the busiest expert had at
most twice as many tokens as the mean, and every expert had some. Parameters that every tensor-parallel rank holds in
full are equal on all ranks; the others differ.

A vLLM plugin does this in vLLM's processes. `installed` writes it into a folder; stock and patched vLLM both load it.

Source: `DummyModelLoader` in `vllm/model_executor/model_loader/dummy_loader.py`, vLLM 0.26 to 0.33.
"""

import os
import zlib
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

NAME = "bridge_dummy_weights"
DONE = "dummy weights are spread"
"""The line that each server process prints once its weights are filled."""


def installed(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Write the plugin into `folder`, and return an environment in which vLLM loads it."""
    package = folder / f"{NAME}-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:patch\n")
    path = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    plugins = environment.get("VLLM_PLUGINS")  # unset means that all plugins load
    named = {} if plugins is None else {"VLLM_PLUGINS": f"{plugins},{NAME}"}
    return {**environment, "PYTHONPATH": path, **named}


def patch() -> None:
    """Patch vLLM's dummy loader; vLLM may call this plugin several times."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415  only vLLM has it

    load = DummyModelLoader.load_weights
    if getattr(load, NAME, False):
        return

    @wraps(load)
    def load_weights(loader: Any, model: Any, *args: Any, **options: Any) -> None:
        load(loader, model, *args, **options)
        _spread_all(model)

    setattr(load_weights, NAME, True)
    DummyModelLoader.load_weights = load_weights


def _spread_all(model: Any) -> None:
    import torch  # noqa: PLC0415
    from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415
    from vllm.model_executor.layers.linear import ReplicatedLinear  # noqa: PLC0415

    from benchmarks._models import is_table, spread  # noqa: PLC0415  imports transformers, which vLLM has done by then

    rank, parameters = get_tensor_model_parallel_rank(), dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            module = model.get_submodule(name.rpartition(".")[0])
            is_whole = parameter.ndim == 1 or isinstance(module, ReplicatedLinear)
            seed = zlib.crc32(f"{name} {0 if is_whole else rank}".encode())
            generator = torch.Generator(device=parameter.device).manual_seed(seed)
            spread(parameter, generator, is_table=is_table(name, parameters))
    print(DONE, flush=True)
