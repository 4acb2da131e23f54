"""The adapter that a trainer writes in place or reloads: its slot, and who may load, replace and unload it.

vLLM writes a slot when it activates an adapter in it, and does not write it again while the adapter stays active
(`LRUCacheWorkerLoRAManager.add_adapter`). A pinned adapter is not evicted.

Symptom: with a pinned adapter, a request for one adapter more than there are free slots stops the entire engine.
Cause: vLLM 0.26 to 0.33 schedules by the number of slots, pinned or not, and discovers in the middle of a step that
no slot is free (`LRUCache.popitem`: "All items are pinned"). The same happens with a request whose adapter was just
removed: the worker would load it again from disk.
Why this is safe: a refused request could not have been served. vLLM's own route reports our message for a refused load.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import HTTPException

from bridge.errors import AttachError
from bridge.server.protocol import ADAPTER
from bridge_patches import wrap
from bridge_patches.admission import is_ours
from bridge_patches.exporter import agreed
from bridge_patches.server_fence import ServerFence

# A refused load returns an object with `error.message` instead of a string; its class moved between versions.
PINS = """
vllm.v1.engine.async_llm
    wrap async AsyncLLM.add_request(lora_request)  # generate() passes the adapter by this keyword
    replace async AsyncLLM.add_lora(lora_request)
    call async AsyncLLM.remove_lora(lora_id)
    call async AsyncLLM.pin_lora(lora_id)
    call async AsyncLLM.abort(request_id, internal)
    AsyncLLM: output_processor, vllm_config
vllm.v1.engine.output_processor
    OutputProcessor: request_states  # by internal number
    RequestState: lora_request
vllm.entrypoints.openai.models.serving
    OpenAIServingModels: lora_requests, base_model_paths, engine_client
    call async OpenAIServingModels.load_lora_adapter(request)
    wrap async OpenAIServingModels.unload_lora_adapter(request)
vllm.entrypoints.serve.lora.protocol
    LoadLoRAAdapterRequest: lora_name, lora_path
    UnloadLoRAAdapterRequest: lora_name
vllm.lora.request: LoRARequest: lora_name, lora_int_id
vllm.config.lora: LoRAConfig: max_loras
vllm.config.vllm: VllmConfig: lora_config  # None if the server has no LoRA
vllm.lora.model_manager
    call LRUCacheLoRAModelManager.pin_adapter(lora_id)  # keeps the slot of an adapter from being evicted
    call LRUCacheLoRAModelManager.activate_adapter(lora_id)  # writes the slot of an adapter that is not active
vllm.lora.worker_manager
    call LRUCacheWorkerLoRAManager.add_adapter(lora_request)  # in each step, for the adapters of its requests
"""
CONFIG_NAME = "adapter_config.json"


class Adapters:
    """The adapter with a pinned slot, and who may load and unload training adapters.

    vLLM's own routes would let any client unload the adapter being trained, or load a different one under its name.
    While a trainer holds the lease, only its requests may do so; they carry the manifest's token. From the first pinned
    adapter on, the engine's `add_request` and `add_lora` are also wrapped.
    """

    def __init__(self, engine: Any, models: Any, fence: ServerFence) -> None:
        self._engine = engine
        self._models = models
        self._fence = fence
        self._is_expected = False
        """Whether a training adapter has been loaded and not yet released."""
        self._num_slots = 0
        """Number of LoRA slots; 0 until the first adapter is served."""
        self._pinned: Any = None
        self._trained: str | None = None
        """Name of the adapter that is pinned or being loaded, which no other request may load."""
        self._is_loading = False
        self._removed: set[int] = set()
        """vLLM's ids of the removed adapters."""
        self._lock = asyncio.Lock()
        wrap(models, "load_lora_adapter")(self.load)
        wrap(models, "unload_lora_adapter")(self.unload)

    async def serve(self, name: str, path: str) -> int:
        """Serve the adapter in folder `path` as `name` in place of the previous one, and return its slot.

        The previous adapter, and any other one called `name`, are removed first: their in-flight requests are aborted,
        and the prefix cache is reset, because vLLM looks up an adapter's keys and values by its name (since 0.32 also
        by its path).
        """
        async with self._lock:
            self._num_slots = self._num_slots or self._wrap_engine()
            if not (Path(path) / CONFIG_NAME).is_file():
                raise AttachError(
                    f"the server finds no {CONFIG_NAME} in {path}",
                    hint=f"ls -l {path}; the server must be able to read it, on its own host",
                )
            self._refuse_unless_slots_remain(name)
            earlier = [self._pinned, self._models.lora_requests.get(name)]
            for adapter in {adapter.lora_int_id: adapter for adapter in earlier if adapter is not None}.values():
                await self._remove(adapter)
            self._pinned = None
            if not await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                raise AttachError(
                    "vLLM refuses to reset its prefix cache, so keys and values of an earlier adapter would be served",
                    hint="retry when no other request is running, or restart the server",
                )
            self._pinned = await self._load(name, path)
            number = self._pinned.lora_int_id
            await self._engine.pin_lora(number)
            slots = await self._engine.collective_rpc("bridge_adapter_slot", args=(number,))
            slot: int | None = agreed(slots, f"the slot of the adapter {name}")
            if slot is None:
                raise AttachError(f"no rank holds the adapter {name} that vLLM has loaded", hint="restart the server")
            return slot

    async def release(self) -> None:
        """Remove the pinned adapter, if there is one, so that vLLM may reuse its slot; no adapter is expected then."""
        async with self._lock:
            if self._pinned is not None:
                await self._remove(self._pinned)
                self._pinned = None
                self._trained = None
            self._is_expected = False

    def _wrap_engine(self) -> int:
        config = self._engine.vllm_config.lora_config
        if config is None:
            raise AttachError(
                "the server was started without LoRA, so it has no slot for an adapter",
                hint="restart it with: bridge serve-vllm --max-lora-rank 16",
            )
        wrap(self._engine, "add_request")(self.add_request)
        wrap(self._engine, "add_lora")(self.add_lora)
        return int(config.max_loras)

    def _refuse_unless_slots_remain(self, name: str) -> None:
        """Raise AttachError unless `name` and every served adapter other than the trained one have their own slot."""
        served = {*self._models.lora_requests, name} - ({self._trained} - {name})
        if len(served) > self._num_slots:
            raise AttachError(
                f"the server has {self._num_slots} LoRA slots for {len(served)} adapters ({', '.join(sorted(served))}),"
                " and a trained adapter cannot share its slot",
                hint=f"restart it with: bridge serve-vllm ... -- --max-loras {len(served)}",
            )

    async def _remove(self, adapter: Any) -> None:
        number = int(adapter.lora_int_id)
        self._models.lora_requests.pop(adapter.lora_name, None)
        self._removed.add(number)
        states = self._engine.output_processor.request_states.items()
        requests = [request for request, state in states if getattr(state.lora_request, "lora_int_id", None) == number]
        if requests:
            await self._engine.abort(requests, internal=True)
        await self._engine.remove_lora(number)

    async def _load(self, name: str, path: str) -> Any:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        self._trained = name
        self._is_loading = True
        try:
            answer = await self._models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path))
            if not isinstance(answer, str):
                raise AttachError(
                    f"vLLM cannot load the adapter {path}: {answer.error.message}",
                    hint="use plain LoRA (no DoRA, no bias) with a rank up to the server's --max-lora-rank",
                )
            return self._models.lora_requests[name]
        except BaseException:
            self._trained = None
            raise
        finally:
            self._is_loading = False

    async def add_request(
        self, original: Callable[..., Any], *args: Any, lora_request: Any = None, **kwargs: Any
    ) -> Any:
        """Pass a request on to the engine; raise ValueError if its adapter was removed in the meantime."""
        if lora_request is not None and lora_request.lora_int_id in self._removed:
            raise ValueError(f"the adapter {lora_request.lora_name} was removed or replaced: send the request again")
        return await original(*args, lora_request=lora_request, **kwargs)

    async def add_lora(self, original: Callable[..., Any], lora_request: Any) -> Any:
        """Let the engine load an adapter; ValueError if that would overwrite the trained one or exceed the slots."""
        name = lora_request.lora_name
        if self._trained == name and not self._is_loading:
            raise ValueError(f"the adapter {name} is trained in place: it cannot be overwritten")
        needed = len({*self._models.lora_requests, name, self._trained})
        if self._trained and needed > self._num_slots:
            raise ValueError(f"{self._trained} is trained in place, and {needed} adapters need --max-loras {needed}")
        return await original(lora_request)

    async def load(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_clients(request.lora_name)
        answer = await original(request, *args, **kwargs)
        self._is_expected = self._is_expected or self.newest() is not None
        return answer

    async def unload(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_clients(request.lora_name)
        answer = await original(request, *args, **kwargs)
        self._is_expected = self._is_expected and (self._fence.lease is not None or self.newest() is not None)
        return answer

    def newest(self) -> str | None:
        """Return the name of the newest training adapter that is served, if any."""
        return next((name for name in reversed(list(self._models.lora_requests)) if name.startswith(ADAPTER)), None)

    def expected(self) -> str | None:
        """Return the adapter for requests that do not name a model; None: the base model.

        HTTPException if an adapter was removed and the next one is not loaded yet.
        """
        name = self.newest()
        if name is None and self._fence.lease is None:  # the trainer exited before it loaded the next adapter
            self._is_expected = False
        if name is None and self._is_expected:
            raise HTTPException(
                503, "the trained adapter is not being served right now: send the request again, or name a model"
            )
        return name

    def _refuse_other_clients(self, name: str) -> None:
        lease = self._fence.lease
        if lease and name.startswith(ADAPTER) and not is_ours.get():
            raise HTTPException(
                409, f"a {lease.trainer} is training {name}: it cannot be loaded or unloaded until that ends"
            )
