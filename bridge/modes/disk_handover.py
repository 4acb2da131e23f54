"""Hand an adapter over by disk: save each version, let the server load it by its own route, and drop the one before.

Works with any vLLM. Nothing is paused: every version has a name of its own, and requests under way go on with the
adapter that they asked for.

Not covered: the slot that vLLM copies it into.
"""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bridge.config import TrainConfig
from bridge.core.interrupt import deferred_interrupt
from bridge.errors import UsageError
from bridge.modes.handover import discard, opened, post, saved, unload, unload_earlier
from bridge.run.run_directory import RunDirectory
from bridge.server import fence
from bridge.server.client import CONTROL_LIMIT_S, BridgeClient
from bridge.server.endpoint import Endpoint
from bridge.server.fence import FenceTimes
from bridge.server.manifest import Manifest
from bridge.server.protocol import ADAPTER
from bridge.weights.adapter import Adapter


class DiskHandover:
    """An adapter that one server loads again and again."""

    def __init__(self, config: TrainConfig, run: RunDirectory, url: str, manifest: Manifest | None) -> None:
        """Prepare for the server at `url`, whose lease is taken if it has a `manifest`.

        Raises:
            AttachError: another trainer has it.
        """
        self._run, self._manifest = run, manifest
        self._client = None if manifest is None else BridgeClient(manifest, timeout_s=CONTROL_LIMIT_S, url=url)
        if self._client is not None:
            fence.when_free(partial(self._client.take_lease, str(run.path.absolute())))
        self._http = opened(url, config.request_timeout_s, manifest.token if manifest else None)
        self._url = url
        self.version = -1

    @property
    def can_sleep(self) -> bool:
        """False: the server generates while this process trains."""
        return False

    @property
    def endpoint(self) -> Endpoint:
        """The server, asked for the newest version; the name says which it is."""
        return Endpoint(url=self._url, model=_versioned(self.version), version=self.version)

    def take(self, adapter: Adapter) -> None:
        """Hand over the adapter as it is, in the place of whatever an earlier run handed over.

        Raises:
            AttachError: the server stands still: something is torn.
        """
        if self._manifest is not None and self._client is not None:
            self._client.status().refuse_torn()  # resuming cannot mend it either: nothing is written in place
            if self._manifest.shard(0).lora_slots:  # an earlier run may have trained in memory
                self._client.release_adapter()
        unload_earlier(self._http)
        shutil.rmtree(self._run.served, ignore_errors=True)  # what a server that died was given
        self._hand_over(adapter, self.version + 1)

    def beside_bytes(self, adapter: Adapter) -> int:
        """Return the size of the trainer's own adapter."""
        return adapter.num_bytes()

    def publish(
        self,
        adapter: Adapter,
        write: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        sleep: bool = False,
        last_checkpoint: Path | None,
    ) -> FenceTimes:
        """Run `prepare` and `write`, then save and load the result."""
        del last_checkpoint  # no server is ever torn: it loads whole adapters
        assert not sleep, "nothing is paused, so that nothing wakes the server"
        start = time.perf_counter()
        fence.interruptible(prepare)
        prepared = time.perf_counter()
        write()
        written = time.perf_counter()
        with deferred_interrupt():
            self._hand_over(adapter, self.version + 1)
        published = time.perf_counter()
        return FenceTimes(
            version=self.version,
            pause_s=0.0,
            prepare_s=prepared - start,
            write_s=written - prepared,
            publish_s=published - written,
        )

    def restore(self, adapter: Adapter, write: Callable[[], None], *, version: int) -> None:
        """Run `write` and hand the result over."""
        write()
        self._hand_over(adapter, max(version, self.version + 1))

    def close(self) -> None:
        """Give the lease back, and close the connections."""
        if self._client is not None:
            self._client.close()
        self._http.close()

    def _hand_over(self, adapter: Adapter, version: int) -> None:
        folder = saved(adapter, self._run.served / _versioned(version))
        try:
            post(self._http, "load_lora_adapter", {"lora_name": _versioned(version), "lora_path": str(folder)})
        except UsageError:  # it is not served, and a run that is refused leaves no trace
            discard(folder)
            raise
        old, self.version = self.version, version
        if old >= 0:  # only now: vLLM may read an adapter again as long as it serves it
            unload(self._http, _versioned(old))
            discard(self._run.served / _versioned(old))


def _versioned(version: int) -> str:
    return f"{ADAPTER}-{version}"
