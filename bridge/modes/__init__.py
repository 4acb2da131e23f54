"""The ways of publishing new weights to vLLM: one base class, `Mode`, and one class for each way.

A mode opens the model to train and publishes each update of it. The trainer does not know which one it runs.
"""

from bridge.modes.lora import LoraDisk, LoraMemory
from bridge.modes.mode import Mode
from bridge.modes.none import InPlace, Restart
from bridge.modes.shared_vllm import SharedVllm
from bridge.modes.transfer import Transfer

WAYS: dict[tuple[str, str], type[Mode]] = {
    ("shared_vllm", ""): SharedVllm,
    ("lora_only", "memory"): LoraMemory,
    ("lora_only", "disk"): LoraDisk,
    ("none", "restart"): Restart,
    ("none", "in-place"): InPlace,
    ("none", "transfer"): Transfer,
}
"""`TrainConfig.way` -> the class that implements it."""
