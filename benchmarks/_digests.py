"""The task of `node.py`, which also records a digest of each rank's weights after each update.

`bridge run --environment benchmarks/_digests.py:Recorded` imports this file in every rank.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._work import Hashed
from bridge.run.saving import Checkpoints
from bridge.types import Group

FOLDER = "DIGESTS_FOLDER"
"""Environment variable with the folder of the records, one file per rank."""
PERIOD = 65_521
"""The digest's factors repeat after this many elements."""


class Recorded(Hashed):
    """The task of `_work.py`; importing this module makes every rank record its digests."""


def digest(weights: Iterable[Tensor]) -> int:
    """Return a position-dependent checksum over all bits of bf16 tensors."""
    total = 0
    for weight in weights:
        bits = weight.detach().reshape(-1).view(torch.int16).to(torch.int64)
        factors = torch.arange(len(bits), device=bits.device) % PERIOD + 1
        total = (total * 31 + int((bits * factors).sum())) % 2**61
    return total


def _record(folder: Path) -> None:
    """Make this rank append the step and the digest to its file whenever a step is written."""
    write = Checkpoints.writing

    @contextmanager
    def writing(checkpoints: Checkpoints, step: int, groups: Iterable[Group]) -> Iterator[None]:
        with write(checkpoints, step, groups):
            yield
        line = json.dumps({"step": step, "digest": digest(checkpoints._policy.trainable.weights.values())})
        with (folder / f"{checkpoints._ranks.rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    Checkpoints.writing = writing  # type: ignore[method-assign, assignment]


if FOLDER in os.environ:
    _record(Path(os.environ[FOLDER]))
