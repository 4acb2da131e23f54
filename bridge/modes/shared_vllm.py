"""`shared_vllm`: the trainer's parameters are vLLM's; nothing is copied, a fence is all that remains of sync.

Not covered: starting the server (`bridge serve-vllm`), tensor parallelism.
"""

from collections.abc import Callable

from bridge.client import BridgeClient
from bridge.config import TrainConfig
from bridge.errors import ManifestError
from bridge.weights import fence, manifest, skeleton
from bridge.weights.attach import AttachedModel, attach
from bridge.weights.fence import FenceTimes


class SharedVllm:
    """One trainer process attached to one live server."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._manifest = manifest.load(config.vllm_config_path)
        _refuse_other_model(config.model_name, self._manifest.model)
        self._client = BridgeClient(
            self._manifest, timeout_s=config.request_timeout_s, url=_url(config, self._manifest.url)
        )
        self.version = self._client.status().version

    @property
    def url(self) -> str:
        """Where the server answers."""
        return self._client.url

    def open(self) -> AttachedModel:
        """Attach to the server's weights."""
        return attach(self._manifest)

    def publish(self, write: Callable[[], None]) -> FenceTimes:
        """Run `write` inside the fence."""
        with fence.deferred_interrupt():  # or an interrupt comes between the update and the note of its version
            times = fence.update(self._client, write, in_flight=self._config.in_flight)
            self.version = times.version
        return times

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _refuse_other_model(wanted: str, served: str) -> None:
    if skeleton.absolute(wanted) != served:
        raise ManifestError(
            f"the server serves {served}, and --model-name asks for {skeleton.absolute(wanted)}",
            remedy=f"--model-name {served}, or another server: bridge serve-vllm --model {wanted}",
        )


def _url(config: TrainConfig, exported: str) -> str:
    """Return the manifest's address, with whatever part of it the user gave in its place."""
    if config.vllm_port is None and "vllm_host" not in config.model_fields_set:
        return exported
    scheme, _, address = exported.partition("://")
    host = f"[{config.vllm_host}]" if ":" in config.vllm_host else config.vllm_host
    return f"{scheme}://{host}:{config.vllm_port or address.rpartition(':')[2]}"
