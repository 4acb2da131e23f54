"""`bridge_patches.preload` with imports that are quick, or that fail with FAILS in the environment."""

import os

from bridge_patches import preload


def imported() -> bool:
    if "FAILS" in os.environ:
        return False
    os.environ["OF_VLLM"] = "vllm"
    os.write(1, b"imported\n")
    return True


if __name__ == "__main__":
    preload._import = imported
    preload.main()
