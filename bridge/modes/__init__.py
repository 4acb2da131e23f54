"""The ways of publishing new weights to vLLM: the base class `Mode`, and one subclass for each way.

A mode opens the model to train and publishes each update. The trainer's code is the same for all modes.
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
