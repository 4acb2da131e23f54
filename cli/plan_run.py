"""What a run's trainer used, beside what was planned for it.

Not covered: vLLM's side: its share of the GPU is an upper bound that it keeps.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.planning.memory import GIB, Need
from bridge.planning.model_size import ModelSize
from bridge.run.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run's trainer; sizes in GiB of what it allocates itself, without vLLM's weights."""

    run: str
    """The run directory."""
    steps: int
    """Steps that were taken."""
    weights_gib: float
    """Planned: weights beside vLLM's."""
    state_gib: float
    """Planned: the optimizer's state."""
    gradients_gib: float
    """Planned: gradients."""
    temporaries_gib: float
    """Planned: logits of one block, and what else lives for a moment."""
    least_activations_gib: float
    """Planned: activations of the smallest micro-batch that the run was free to take."""
    most_activations_gib: float
    """Planned: of the largest."""
    planned_gib: float
    """All of it, with the smallest micro-batch."""
    measured_gib: float
    """What the trainer had allocated at most."""
    ratio: float | None
    """Measured over planned; None: it says nothing."""
    why_not: str
    """Why it says nothing; empty: it does."""


def compare(size: ModelSize, path: Path) -> Comparison:
    """Compare the run in the directory `path` with what `size` and its choices need.

    Raises:
        UsageError: there is no run that took a step.
    """
    run = RunDirectory(path)
    config, steps = _config(run), _steps(run)
    need = Need.of(size, config, gpu_bytes=0)
    measured, why_not = steps[-1]["peak_memory_gib"], _why_not(steps[-1].get("device"))
    return Comparison(
        run=str(path),
        steps=len(steps),
        weights_gib=need.own / GIB,
        state_gib=need.state / GIB,
        gradients_gib=need.gradients / GIB,
        temporaries_gib=need.temporaries / GIB,
        least_activations_gib=need.least_activations / GIB,
        most_activations_gib=need.most_activations / GIB,
        planned_gib=need.allocated / GIB,
        measured_gib=measured,
        ratio=None if why_not else measured * GIB / need.allocated,
        why_not=why_not,
    )


def _why_not(device: str | None) -> str:
    if device is None:
        return "the run does not tell whether it was on a GPU"
    return "" if device == "cuda" else "the run was on the CPU, where all of the process is measured"


def _config(run: RunDirectory) -> TrainConfig:
    try:
        return TrainConfig.of(**run.choices())
    except OSError as error:
        raise UsageError(f"{run.path} holds no run: no {run.config.name}", remedy="--run runs/TIME-TASK") from error
    except ValidationError as error:
        fault = error.errors()[0]
        raise UsageError(
            f"{run.config} was not written by this Bridge: {'.'.join(map(str, fault['loc']))}: {fault['msg']}",
            remedy="compare with the Bridge that the run was made with",
        ) from error


def _steps(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the steps' metrics, without a last line that a killed process has cut short."""
    lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("}")]
    if not steps:
        raise UsageError(f"{run.path} holds no step: there is nothing to compare", remedy="name a run that trained")
    return steps
