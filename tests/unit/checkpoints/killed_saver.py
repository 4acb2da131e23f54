"""A process that saves checkpoints repeatedly until it is killed; started by `test_checkpoint.py`.

It does not import torch and has one thread, so that forking is fast.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import Progress
from bridge.errors import CheckpointError

KILLS = 20
FILES = {"model.safetensors": 500_000, "config.json": 200, "optimizer/optimizer-00001-of-00001.safetensors": 1_000_000}
LONGEST_S = 0.05


def progress(step: int) -> Progress:
    return Progress(step=step, weight_version=step, problems_drawn=step, run_dir=Path("/run"))


def content(step: int) -> bytes:
    return bytes([step % 256])


def save(folder: Path, step: int) -> None:
    def write(scratch: Path) -> None:
        for name, num_bytes in FILES.items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_bytes(content(step) * num_bytes)

    checkpoint.save(folder / f"step_{step}", write, progress(step))


def save_for_ever(folder: Path, first: int) -> None:
    """Save consecutive steps, each twice, and keep the last two."""
    kept = [path for _, path in sorted(checkpoint.numbered(folder, "step_").items())]
    for step in range(first, 10_000):
        save(folder, step)
        save(folder, step)
        kept = checkpoint.keep_last([*kept, folder / f"step_{step}"], 2)


def killed(folder: Path, first: int, num_steps: int, after_s: float) -> None:
    """Save in a child, and kill it some seconds after it has saved `num_steps` steps."""
    child = os.fork()
    if child == 0:
        save_for_ever(folder, first)
        os._exit(1)
    while num_steps and not (folder / f"step_{first + num_steps - 1}").exists():
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def fault(folder: Path) -> str | None:
    try:
        checkpoint.read(folder)
    except CheckpointError as error:
        return error.message
    return None


def left_behind(folder: Path) -> dict[str, object]:
    """Return the files that a kill left behind."""
    newest, passed_over = checkpoint.newest(folder, "step_")
    faults = [*passed_over, *(fault(path) for path in folder.glob("step_*"))]
    names = sorted(path.name for path in folder.iterdir())
    step = newest.progress.step if newest else 0
    whole = newest is None or all((newest.folder / name).read_bytes() == content(step) * n for name, n in FILES.items())
    visible = [name for name in names if not name.startswith(".")]
    hidden = [name for name in names if name.startswith(".")]
    return {"step": step, "whole": whole, "faults": [*filter(None, faults)], "visible": visible, "hidden": hidden}


def main() -> None:
    folder, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    first = 1
    for _ in range(KILLS):
        killed(folder, first, chance.randint(0, 2), chance.uniform(0, LONGEST_S))
        report = left_behind(folder)
        first = int(str(report["step"])) + 1
        print(json.dumps(report), flush=True)  # noqa: T201  its report
    save(folder, first)
    print(json.dumps(left_behind(folder)))  # noqa: T201


if __name__ == "__main__":
    main()
