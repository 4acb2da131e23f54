"""The proof of one family: a tiny model is served, trained in place, compared with its checkpoint, and verified.

Training and plain transformers use the experts that the server reports: an expert swapped by rounding differs by
more than a wrong weight, and in layers with a state, for all following tokens.

Not covered: the families (`models/families.py`), and their results (`family_results.py`).
"""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from bridge.checks.one_copy_proof import logprob_diffs
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.server.manifest import Shard
from bridge.types import Group
from bridge.weights import skeleton
from bridge.weights.attach import attach
from bridge.weights.model_folder import state
from tests import scenarios
from tests.family_results import Result
from tests.models import tiny
from tests.scenarios import LiveServer

GAIN = 0.7
MOVED_AT_LEAST = 4
"""How many times farther the server must be from the old weights than from its checkpoint after training."""


def prove(config: PretrainedConfig, folder: Path, *, engine: Sequence[str] = (), lr: float = scenarios.LR) -> Result:
    """Check the family of `config` on a separate server with vLLM's defaults, and return the result.

    Random weights are scaled so that every layer's output is about as large as its input, at any width.
    """
    model = tiny.write(config, folder / "model", std=GAIN / sqrt(config.get_text_config().hidden_size))
    with scenarios.served(model, folder / "server", *engine, compiled=True) as server:
        result = trains(server, model, folder, lr=lr)
        scenarios.check_metrics(folder / "run", parity_limit=scenarios.FAMILY_PARITY_LIMIT)
        scenarios.verifies(server, folder)
    return result


def trains(server: LiveServer, model: Path, folder: Path, *, lr: float) -> Result:
    """Train three steps, and compare the server with transformers before and after."""
    assert attach(server.manifest).weight_bytes() == 0  # refused unless all parameters have counterparts
    device, experts = scenarios.device_of(server), server.status().experts
    plain, saved = _load(model, device, experts), folder / "saved" / "step_3"
    before = _mean(plain, server.sample())
    scenarios.trained(server, folder, "--lr", str(lr))
    scenarios.check_replay(folder / "run", is_on=experts is not None)
    after_steps = server.sample()
    trained = _load(saved, device, experts)
    after, moved = _mean(trained, after_steps), _mean(plain, after_steps)
    assert {path.name for path in model.iterdir()} <= {path.name for path in saved.iterdir()}
    was, now = plain.model.state_dict(), trained.model.state_dict()
    for name, tensor in state(skeleton.build(str(model), torch.bfloat16)).items():
        if not tensor.requires_grad:  # another part of the model, or a buffer
            assert torch.equal(now[name], was[name]), name
    assert max(before, after) < scenarios.FAMILY_PARITY_LIMIT, (before, after, moved)
    assert moved > MOVED_AT_LEAST * after, (before, after, moved)
    return Result(
        transformers_class=type(plain.model).__name__,
        vllm_class=server.manifest.shards[0].model_class,
        together=together(server.manifest.shards[0]),
        before=round(before, 4),
        after=round(after, 4),
        moved=round(moved, 4),
        num_parameters=plain.model.num_parameters(),
        versions=" ".join(f"{name} {server.manifest.versions[name]}" for name in ("vllm", "torch", "transformers")),
    )


def together(shard: Shard) -> tuple[str, ...]:
    """Return the last name parts of parameters that share a vLLM parameter, and whether the vocabulary is padded."""
    parts: dict[str, list[str]] = {}
    for name, view in sorted(shard.param_mappings.items(), key=lambda item: item[1].offset):
        parts.setdefault(view.parameter, []).append(name.removesuffix(".weight").removesuffix(".bias"))
    fused = {" ".join(name.rpartition(".")[2] for name in names) for names in parts.values() if len(names) > 1}
    return (*sorted(fused), *(["padded vocabulary"] if shard.padding else []))


def _load(folder: Path, device: str, experts: tuple[int, int] | None) -> PreparedModel:
    """Load a model with transformers, using longrope's long factors at every length, as vLLM does.

    A mixture of experts computes with the experts of the samples; `experts` is as in `RouterReplay.of`.

    vLLM applies the long factors to all sequences as soon as the maximum length allows long ones; transformers only
    applies them to long sequences.
    """
    config = AutoConfig.from_pretrained(folder)
    if "long_factor" in (rope := config.get_text_config().rope_parameters or {}):
        assert config.original_max_position_embeddings < scenarios.MAX_MODEL_LEN
        config.rope_parameters = {**rope, "short_factor": rope["long_factor"]}
    kind = skeleton.auto_class(config)
    loaded = PreparedModel(kind.from_pretrained(folder, config=config, dtype=torch.bfloat16).to(device))
    if experts is not None:
        loaded.replay = RouterReplay.of(loaded.model, experts)
    return loaded


def _mean(prepared: PreparedModel, samples: list[Group]) -> float:
    return float(logprob_diffs(prepared, samples).mean())
