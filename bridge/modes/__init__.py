"""How new weights reach vLLM: one small protocol, and an implementation per mode.

Words: *mode*; `open` gives the model to train, `publish` makes one update visible to generation.
The implementations do not know each other, and the training loop does not know which one it runs.
May import: `bridge.server`, `bridge.weights`, `bridge.config`, `bridge.core`.
"""

from typing import Protocol

from bridge.config import TrainConfig
from bridge.modes.lora_only import LoraOnly
from bridge.modes.mode import Engine, Mode
from bridge.modes.none import NoneMode
from bridge.modes.shared_vllm import SharedVllm
from bridge.run.run_directory import RunDirectory


class _Opener(Protocol):
    checkpoint_prefix: str

    def __call__(self, config: TrainConfig, run: RunDirectory, engine: Engine | None) -> Mode: ...


MODES: dict[str, _Opener] = {"shared_vllm": SharedVllm, "lora_only": LoraOnly, "none": NoneMode}
"""Implementations by the name that `--mode` takes."""
