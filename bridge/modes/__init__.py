"""How new weights reach vLLM: one small protocol, and an implementation per mode.

Words: *mode*; `open` gives the model to train, `publish` makes one update visible to generation.
The implementations do not know each other, and the training loop does not know which one it runs.
May import: `bridge.weights`, `bridge.client`, `bridge.config`.
"""

from typing import Protocol

from bridge.config import TrainConfig
from bridge.modes.mode import Mode
from bridge.modes.shared_vllm import SharedVllm


class _Opener(Protocol):
    def __call__(self, config: TrainConfig) -> Mode: ...


MODES: dict[str, _Opener] = {"shared_vllm": SharedVllm}
"""Implementations by the name that `--mode` takes."""
