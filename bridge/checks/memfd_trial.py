"""The program of the memfd trial: open another process's memfd by its /proc path and write a mark into it.

Not covered: creating the memfd and judging the outcome (`memfd.py`).
"""

import mmap
import os
import sys

from bridge.checks.child import ERROR
from bridge.checks.memfd import MARK


def main(path: str) -> int:
    """Write the mark through a shared mapping of `path`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with mmap.mmap(descriptor, 0) as memory:
            memory[: len(MARK)] = MARK
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{ERROR}{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
