"""The ways of publishing new weights to vLLM: one base class, `Mode`, and one class for each way.

A mode opens the model to train and publishes each update of it. The trainer does not know which one it runs.
"""

from bridge.config import TrainConfig
from bridge.modes.lora import LoraDisk, LoraMemory
from bridge.modes.mode import Mode
from bridge.modes.none import InPlace, Restart
from bridge.modes.shared_vllm import SharedVllm

WAYS: dict[tuple[str, str], type[Mode]] = {
    ("shared_vllm", ""): SharedVllm,
    ("lora_only", "memory"): LoraMemory,
    ("lora_only", "disk"): LoraDisk,
    ("none", "restart"): Restart,
    ("none", "in-place"): InPlace,
}
"""(`--mode`, `--lora-handover` or `--reload`) -> the class that implements it."""


def way_of(config: TrainConfig) -> type[Mode]:
    return WAYS[config.mode, {"lora_only": config.lora.handover, "none": config.publishing.reload}.get(config.mode, "")]
