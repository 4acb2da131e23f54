"""`none`: the trainer owns a copy of the weights, and saves it for the server. The base of both ways to reload.

The server may be any that speaks the OpenAI protocol, on this host or another. Between two reloads it serves older
weights: rollouts are off-policy by up to that many steps. The loss corrects for this, because the log-probabilities
that it compares with are the server's own.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch

from bridge.config import TrainConfig
from bridge.modes.mode import RunContext
from bridge.server import fence
from bridge.server.fence import FenceTimes, Update
from bridge.weights import loaded, model_folder
from bridge.weights.opened_model import OpenedModel


class OwnCopy(ABC):
    """One trainer process with its own weights, beside one server."""

    checkpoint_prefix = "step_"
    can_sleep = False
    """The server generates while this process trains, or does not run at all."""

    def __init__(
        self, config: TrainConfig, run: RunContext, *, max_model_len: int | None, dtype: torch.dtype | None = None
    ) -> None:
        self._config, self._run, self._dtype = config, run, dtype
        self.max_model_len = max_model_len
        self._behind = 0
        """Steps that the server does not serve yet."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The served version."""

    def open(self) -> OpenedModel:
        """Load the model."""
        model_folder.tokenizer_files(self._config.model_name)  # checkpoints need them
        opened = loaded.load(
            self._config.model_name,
            device=self._config.trainer_device,
            dtype=self._dtype,
            max_model_len=self.max_model_len,
        )
        self._model = opened.model
        return opened

    def publish(self, update: Update) -> FenceTimes:
        """Run `update`, and reload the server every `--vllm-restart-interval` steps.

        Units: `publish_s` includes saving the model and reloading the server; it is 0 without a reload.
        """
        assert not update.sleep, "nothing pauses the server, so nothing would wake it"
        pause_s, reloads = 0.0, False

        def publish() -> int:
            nonlocal pause_s, reloads
            self._behind += 1
            reloads = self._behind >= self._config.publishing.restart_interval and not update.is_last
            if reloads:
                pause_s = self._reload()
            return self.version

        times = fence.run(update, publish)
        return replace(times, pause_s=pause_s, publish_s=times.publish_s - pause_s if reloads else 0.0)

    def catch_up(self) -> None:
        """Reload the server now if it serves older weights."""
        if self._behind:
            self._reload()

    def save(self, folder: Path) -> None:
        """Write the weights as a plain Hugging Face model."""
        model_folder.save(self._model, self._config.model_name, folder)

    def _saved(self) -> Path:
        """Save the next version in the scratch folder."""
        return self._run.saved(f"version_{self.version + 1}", self.save)

    @abstractmethod
    def _reload(self) -> float:
        """Let the server serve the newest weights, and return the seconds until it had paused."""
