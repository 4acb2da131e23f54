"""Who draws curves: TensorBoard, and Weights & Biases.

Both are foreign code, imported when one of them is made; what they raise is dealt with in `trackers.py`.

Not covered: what is drawn (`curves.py`).
"""

import html
import json
import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from bridge.config import TrainConfig
from bridge.config.choices import flattened
from bridge.core import atomic_file, private
from bridge.run.run_directory import RunDirectory


class Tracker(Protocol):
    """Draws curves."""

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        """Draw the next point of each curve, and show a text."""
        ...

    def close(self, *, failed: bool) -> None:
        """Hand over everything."""
        ...


class TensorBoard:
    """Writes a folder that `tensorboard --logdir` reads."""

    def __init__(self, config: TrainConfig, run: RunDirectory, first_step: int) -> None:
        """Write into `run`; curves of an earlier process end before `first_step`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step, flush_secs=10)
        self._writer.add_text("config", _indented(json.dumps(_shown(config), indent=1)))

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        """Write one point a curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if sample is not None:
            self._writer.add_text("sample", _indented(sample), step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the protocol's
        """Write what is still in memory."""
        self._writer.close()


class Wandb:
    """Sends to Weights & Biases, or writes for it, as its own variables say: WANDB_MODE, WANDB_PROJECT and others.

    A point that is sent again after a run went on from an earlier step is kept beside the first one, not dropped.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory) -> None:
        """Begin a run there, or go on with the one that `run` knows."""
        wandb: Any = import_module("wandb")
        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bridge"),
            name=os.environ.get("WANDB_NAME", run.path.name),
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            id=_run_id(run),
            resume="allow",
            config=_shown(config),
            settings=wandb.Settings(console="off"),  # the terminal is ours
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], sample: str | None = None) -> None:
        """Send one point a curve."""
        shown = {} if sample is None else {"sample": self._html(f"<pre>{html.escape(sample)}</pre>", inject=False)}
        self._run.log({"step": step, **values, **shown})

    def close(self, *, failed: bool) -> None:
        """Send what is still here."""
        self._run.finish(exit_code=int(failed))


def _run_id(run: RunDirectory) -> str:
    """Return the id of the run at Weights & Biases, a new one the first time."""
    if not run.wandb_id.exists():
        new = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        atomic_file.replace(run.wandb_id, f"{new}\n".encode())
    return run.wandb_id.read_text().strip()


def _indented(text: str) -> str:
    """Return `text` as Markdown shows it letter by letter, whatever is in it."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _shown(config: TrainConfig) -> dict[str, Any]:
    return private.shown(flattened(TrainConfig, config.model_dump(mode="json")))
