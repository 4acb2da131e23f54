"""Bridge: one copy of the weights for generation and training.

    import bridge

    with bridge.attach() as policy:  # the model of a running `bridge serve-vllm`
        optimizer = policy.optimizer("adamw", lr=1e-6)
        for step in range(100):
            groups = policy.sample(problems, score)
            for batch in policy.pack(bridge.samples(groups)):
                logprobs, _ = policy.logprobs(batch)
                bridge.policy_loss(logprobs, batch).backward()
            policy.update(optimizer, max_norm=1.0)
        policy.save("trained")

These names are stable; every other module may change. Importing this one imports neither torch nor vLLM.

Terms (each has one meaning everywhere in this repository):

- *manifest*: `vllm_bridge_config.json`, what a server exports so that a trainer can attach.
- *storage*: one allocation that a handle opens (CUDA IPC, or shared memory on the CPU).
- *view*: (storage, offset, shape, stride), one parameter or a slice of a fused one.
- *layout*: which views make up which Hugging Face parameter.
- *attach*: point every parameter of a meta-device model at a view.
- *fence*: paused -> written -> published, the only window in which weights change.
- *version*: number of published updates since the server loaded.
- *mode*: how new weights reach vLLM.
- *rollout*, *group*: one sampled completion with its reward; the rollouts of one prompt.

May import: neither `bridge_patches`, `bridge_environments` nor `bridge_cli`; neither vLLM, typer nor rich.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.checks import Check
    from bridge.config import (
        ComputeConfig,
        LoraConfig,
        LossConfig,
        OptimizerConfig,
        PublishingConfig,
        SamplingConfig,
    )
    from bridge.engine.gradients import Passes
    from bridge.engine.policy import Policy, Step
    from bridge.errors import BridgeError
    from bridge.learn.own_loss import LossTensors
    from bridge.library import attach, policy_loss, samples, serve
    from bridge.passes.packing import MicroBatch, Sample
    from bridge.server.fence import FenceTimes
    from bridge.trl import for_trl
    from bridge.types import Completion, Group

__version__ = "0.1.0"
__all__ = [
    "BridgeError",
    "Check",
    "Completion",
    "ComputeConfig",
    "FenceTimes",
    "Group",
    "LoraConfig",
    "LossConfig",
    "LossTensors",
    "MicroBatch",
    "OptimizerConfig",
    "Passes",
    "Policy",
    "PublishingConfig",
    "Sample",
    "SamplingConfig",
    "Step",
    "attach",
    "for_trl",
    "policy_loss",
    "samples",
    "serve",
]
_MODULES = {
    "bridge.checks": ("Check",),
    "bridge.config": (
        "ComputeConfig",
        "LoraConfig",
        "LossConfig",
        "OptimizerConfig",
        "PublishingConfig",
        "SamplingConfig",
    ),
    "bridge.engine.gradients": ("Passes",),
    "bridge.errors": ("BridgeError",),
    "bridge.learn.own_loss": ("LossTensors",),
    "bridge.library": ("attach", "policy_loss", "samples", "serve"),
    "bridge.passes.packing": ("MicroBatch", "Sample"),
    "bridge.engine.policy": ("Policy", "Step"),
    "bridge.server.fence": ("FenceTimes",),
    "bridge.trl": ("for_trl",),
    "bridge.types": ("Completion", "Group"),
}
"""Module -> names that are imported from it when they are first used."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'bridge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
