"""Count the Bridge files that one training step touches: in total, and in its longest chain of calls.

    python -m tests.architecture.step_files

A real trainer takes three steps on a patched server without vLLM. The second step is profiled in the trainer's process.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import bridge
from bridge.core.address import free_port
from bridge.run.trainer import Run
from bridge.types import Group
from bridge_cli.main import answer
from tests.models import tiny
from tests.unit import patched_server

PACKAGE = str(Path(bridge.__file__).parent)
FOLLOWED_STEP = 2
TASK = """
class Uneven:
    def __iter__(self):
        yield from ({"prompt": f"say {number}:"} for number in range(40))

    def score(self, problem, completion):
        return sum(map(ord, completion)) % 10 / 10
"""


@dataclass
class Passage:
    """Files that one step touches."""

    files: set[str] = field(default_factory=set)
    """All files."""
    chain: list[str] = field(default_factory=list)
    """The longest chain of files on the call stack, outermost first."""

    def follow(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Record one call; a profile function for `sys.setprofile`."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE) or name.endswith("__init__.py"):
            return
        self.files.add(name)
        chain = list(dict.fromkeys(reversed([*_bridge_files(frame)])))
        if len(chain) > len(self.chain):
            self.chain = chain


def _bridge_files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_filename
        frame = frame.f_back


def measure(folder: Path) -> Passage:
    """Train in `folder` and return the files that one step touched."""
    model = tiny.write(tiny.llama(), folder / "model")
    (folder / "uneven.py").write_text(TASK)
    passage = Passage()
    take_groups, save = Run._take_groups, Run._save

    def followed(self: Any, number: int) -> list[Group]:
        if number == FOLLOWED_STEP:
            sys.setprofile(passage.follow)
        groups: list[Group] = take_groups(self, number)
        return groups

    def ended(self: Any) -> Path:
        sys.setprofile(None)
        return save(self)

    Run._take_groups = followed  # type: ignore[method-assign]
    Run._save = ended  # type: ignore[method-assign]
    try:
        with patched_server.served(model, folder / "server", port=free_port("127.0.0.1")) as server:
            code = answer([
                "train", "--model-name", str(model), "--vllm-config-path", str(server.path), "--reward-processes", "0",
                "--environment", f"{folder / 'uneven.py'}:Uneven", "--batch-size", "8", "--group-size", "4",
                "--max-new-tokens", "16", "--training-steps", "3", "--save-interval", "1", "--mismatch-alarm", "99",
                "--run-dir", str(folder / "run"),
            ])  # fmt: skip
    finally:
        Run._take_groups = take_groups  # type: ignore[method-assign]
        Run._save = save  # type: ignore[method-assign]
    assert code == 0, "training failed"
    return passage


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder))
    print(f"files: {len(measured.files)}")  # noqa: T201
    print(f"longest chain: {len(measured.chain)}")  # noqa: T201
    for name in measured.chain:
        print("  " + str(Path(name).relative_to(Path(PACKAGE).parent)))  # noqa: T201


if __name__ == "__main__":
    main()
