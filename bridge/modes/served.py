"""The patched server that a mode works with: its manifest, which has to be of the model that is trained.

Not covered: finding and checking the manifest itself (`bridge/weights/manifest.py`).
"""

from bridge.config import TrainConfig
from bridge.errors import ManifestError
from bridge.weights import manifest, skeleton
from bridge.weights.manifest import Manifest


def find(config: TrainConfig) -> Manifest:
    """Return the manifest of the server that serves the model to train.

    Raises:
        ManifestError: there is none, it cannot be used, or another model is served.
    """
    found = manifest.load(config.vllm_config_path)
    wanted = skeleton.absolute(config.model_name)
    if wanted != found.model:
        raise ManifestError(
            f"the server serves {found.model}, and --model-name asks for {wanted}",
            remedy=f"--model-name {found.model}, or another server: bridge serve-vllm --model {config.model_name}",
        )
    return found
