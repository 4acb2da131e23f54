"""The program of a model's trial: build its class without its weights, and say in one line why it cannot be trained.

Not covered: what the configuration shows (`model.py`).
"""

import sys

import torch

from bridge.checks.child import ERROR
from bridge.errors import BridgeError
from bridge.weights import skeleton


def main(model: str) -> int:
    """Build the class of `model`, and return the exit code of what refuses it."""
    try:
        skeleton.build(model, torch.bfloat16)
    except BridgeError as error:
        sys.stderr.write(f"{ERROR}{error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
