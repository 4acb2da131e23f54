"""`bridge_patches.preloaded_server` with imports that are quick, or that fail with FAILS in the environment."""

import os

from bridge_patches import preloaded_server


def imported() -> bool:
    if "FAILS" in os.environ:
        return False
    os.environ["OF_VLLM"] = "vllm"
    os.write(1, b"imported\n")
    return True


if __name__ == "__main__":
    preloaded_server._import = imported
    preloaded_server.main()
