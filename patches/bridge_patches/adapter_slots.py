"""The slots of adapters that a trainer writes in place, and who may load, replace and unload these adapters.

vLLM writes a slot when it activates an adapter in it, and does not write it again while the adapter stays active
(`LRUCacheWorkerLoRAManager.add_adapter`). A pinned adapter is not evicted.

There is either one slot, of the adapter that is being trained (`serve`), or all free ones are open for adapters that
take turns (`open_slots`). Then vLLM keeps the same adapters pinned, and what a slot holds is served under a new name
each time that the trainer has rewritten it: vLLM knows an adapter's slot by its number, and its cached keys and values
by its name. A slot is only rewritten while no request uses it.

Symptom: with a pinned adapter, a request for one adapter more than there are free slots stops the entire engine.
Cause: vLLM 0.26 to 0.33 schedules by the number of slots, pinned or not, and discovers in the middle of a step that
no slot is free (`LRUCache.popitem`: "All items are pinned"). The same happens with a request whose adapter was just
removed: the worker would load it again from disk.
Why this is safe: a refused request could not have been served. vLLM's own route reports our message for a refused load.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
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
vllm.lora.request: LoRARequest: lora_name, lora_int_id  # the name of a copy may be changed
vllm.config.lora: LoRAConfig: max_loras
vllm.config.vllm: VllmConfig: lora_config  # None if the server has no LoRA
vllm.lora.model_manager
    call LRUCacheLoRAModelManager.pin_adapter(lora_id)  # keeps the slot of an adapter from being evicted
    call LRUCacheLoRAModelManager.activate_adapter(lora_id)  # writes the slot of an adapter that is not active
vllm.lora.worker_manager
    call LRUCacheWorkerLoRAManager.add_adapter(lora_request)  # in each step, for the adapters of its requests
"""
CONFIG_NAME = "adapter_config.json"
UNNAMED = "bridge-slot"
"""Name under which vLLM loads the first adapter of an open slot, with the slot's index; no request can use it."""
IDLE_POLL_S = 0.005
"""Seconds between checks whether a slot has no requests in flight any more."""


@dataclass(eq=False)
class Slot:
    """A slot whose adapter is pinned in vLLM, and which a trainer writes."""

    number: int
    """Index in the manifest's `lora_slots`."""
    adapter: Any
    """vLLM's request for the adapter, with the name of what the slot holds."""
    name: str | None
    """Name of what the slot holds or, while it is reserved, will hold; None: it may be reserved."""
    is_served: bool
    """Whether requests may use the name; a slot with a name that is not served is reserved."""


class Adapters:
    """The adapters with slots that a trainer writes, and who may load and unload training adapters.

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
        self._slots: list[Slot] = []
        """The slots that the trainer writes, in the order in which they were last reserved."""
        self._loading: str | None = None
        """Name of the adapter that is being loaded into a slot."""
        self._removed: set[int] = set()
        """vLLM's ids of the removed adapters."""
        self._entering: Counter[int] = Counter()
        """vLLM's id of a pinned adapter -> number of its requests that the engine is just receiving."""
        self._lock = asyncio.Lock()
        self._reserving = asyncio.Lock()
        wrap(models, "load_lora_adapter")(self.load)
        wrap(models, "unload_lora_adapter")(self.unload)

    async def serve(self, name: str, path: str) -> int:
        """Serve the adapter in folder `path` as `name` in place of the previous ones, and return its slot.

        The previous adapters with slots, and any other one called `name`, are removed first: their in-flight requests
        are aborted, and the prefix cache is reset, because vLLM looks up an adapter's keys and values by its name
        (since 0.32 also by its path).
        """
        async with self._lock:
            (slot,) = await self._pin([name], path)
            return slot.number

    async def open_slots(self, path: str) -> list[int]:
        """Load the adapter in folder `path` into every free slot, to be rewritten, and return these slots.

        They replace the previous adapters with slots. Nothing is served from them until `reserve` has given one a name,
        and `serve_reserved` has been called for it.
        """
        async with self._lock:
            self._num_slots = self._num_slots or self._wrap_engine()
            number = self._num_slots - len(self._others())
            if number < 1:
                names = ", ".join(sorted(self._others()))
                raise AttachError(
                    f"all {self._num_slots} LoRA slots of the server hold other adapters: {names}",
                    hint="unload some of them, or restart the server with more slots: -- --max-loras N",
                )
            opened = await self._pin([f"{UNNAMED}-{index}" for index in range(number)], path)
            for slot in opened:
                self._empty(slot)
            return [slot.number for slot in opened]

    async def reserve(
        self, name: str, has_left: Callable[[], Awaitable[bool]] | None = None, *, keep: Collection[str] = ()
    ) -> int:
        """Give an open slot to a new adapter called `name`, and return the slot; a repeated call returns the same one.

        Its previous contents are not served any more. Of the slots without requests in flight, it is the one that was
        reserved longest ago. If all have some, no new ones are accepted for the contents of the first that was
        reserved, and the call waits until any slot has none, or the client disconnects (`has_left`). The slots of the
        names in `keep` are not considered.
        """
        async with self._reserving:
            found = next((slot for slot in self._slots if slot.name == name), None)
            if found is not None:
                self._refuse_served(name)
                return found.number
            while True:
                if has_left is not None and await has_left():
                    raise AttachError(f"the client that waited for a LoRA slot for {name} has left", hint="retry")
                available = [
                    slot for slot in self._slots if slot.name is None or (slot.is_served and slot.name not in keep)
                ]
                if not available:
                    raise AttachError(
                        f"the server has {len(self._slots)} open LoRA slots, and all of them are being written",
                        hint="attach again: the trainer opens the slots when it starts",
                    )
                idle = [slot for slot in available if self._is_idle(slot)]
                if idle:
                    chosen = next((slot for slot in idle if slot.name is None), idle[0])
                    break
                if all(slot.is_served for slot in available):
                    self._empty(available[0])
                await asyncio.sleep(IDLE_POLL_S)
            self._empty(chosen)
            chosen.name = name
            self._slots.remove(chosen)
            self._slots.append(chosen)
            return chosen.number

    def serve_reserved(self, name: str) -> None:
        """Serve what was written into the slot that is reserved for `name`; a repeated call has no effect."""
        slot = next((slot for slot in self._slots if slot.name == name), None)
        if slot is None:
            raise AttachError(f"no LoRA slot is reserved for {name}", hint="reserve one first")
        if slot.is_served:
            return
        self._refuse_served(name)
        slot.adapter = copy.copy(slot.adapter)  # requests in flight keep the name that they began with
        slot.adapter.lora_name = name
        slot.is_served = True
        self._models.lora_requests[name] = slot.adapter
        self._is_expected = self._is_expected or self.newest() is not None

    async def release(self) -> None:
        """Remove the adapters with slots, so that vLLM may reuse these and their names; none is expected then."""
        async with self._lock:
            released = [*self._slots]
            await self._remove_all(slot.adapter for slot in released)
            self._slots = []
            self._is_expected = False
            if released:
                await self._reset_prefix_cache()

    def _refuse_served(self, name: str) -> None:
        if name in self._models.lora_requests:
            raise AttachError(f"another adapter is served as {name}", hint="choose a new name for each adapter")

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

    async def _pin(self, names: Sequence[str], path: str) -> list[Slot]:
        """Load the adapter in folder `path` once per name, each time into another slot; remove the previous ones."""
        self._num_slots = self._num_slots or self._wrap_engine()
        if not (Path(path) / CONFIG_NAME).is_file():
            raise AttachError(
                f"the server finds no {CONFIG_NAME} in {path}",
                hint=f"ls -l {path}; the server must be able to read it, on its own host",
            )
        self._refuse_unless_slots_remain(names)
        earlier = [*(slot.adapter for slot in self._slots), *(self._models.lora_requests.get(name) for name in names)]
        await self._remove_all(adapter for adapter in earlier if adapter is not None)
        self._slots = []
        await self._reset_prefix_cache()
        adapters = list[Any]()
        try:
            for name in names:
                adapters.append(await self._load(name, path))
                number = await self._pinned(adapters[-1])
                self._slots.append(Slot(number, adapters[-1], name, is_served=True))
        except BaseException:
            await self._remove_all(adapters)
            self._slots = []
            raise
        return [*self._slots]

    async def _reset_prefix_cache(self) -> None:
        if not await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise AttachError(
                "vLLM refuses to reset its prefix cache, so keys and values of an earlier adapter would be served",
                hint="retry when no other request is running, or restart the server",
            )

    async def _pinned(self, adapter: Any) -> int:
        """Pin an adapter that vLLM has loaded, and return its slot."""
        await self._engine.pin_lora(adapter.lora_int_id)
        slots = await self._engine.collective_rpc("bridge_adapter_slot", args=(adapter.lora_int_id,))
        slot: int | None = agreed(slots, f"the slot of the adapter {adapter.lora_name}")
        if slot is None:
            message = f"no rank holds the adapter {adapter.lora_name} that vLLM has loaded"
            raise AttachError(message, hint="restart the server")
        return slot

    def _others(self) -> set[str]:
        """Return the names of the served adapters without a slot that the trainer writes."""
        return {*self._models.lora_requests} - {slot.name for slot in self._slots}

    def _refuse_unless_slots_remain(self, names: Collection[str]) -> None:
        """Raise AttachError unless these and every served adapter that they do not replace have their own slot."""
        served = self._others() | {*names}
        if len(served) > self._num_slots:
            raise AttachError(
                f"the server has {self._num_slots} LoRA slots for {len(served)} adapters ({', '.join(sorted(served))}),"
                " and a trained adapter cannot share its slot",
                hint=f"restart it with: bridge serve-vllm ... -- --max-loras {len(served)}",
            )

    async def _remove_all(self, adapters: Iterable[Any]) -> None:
        for adapter in {adapter.lora_int_id: adapter for adapter in adapters}.values():
            await self._remove(adapter)

    async def _remove(self, adapter: Any) -> None:
        number = int(adapter.lora_int_id)
        self._models.lora_requests.pop(adapter.lora_name, None)
        self._removed.add(number)
        if requests := self._requests(number):
            await self._engine.abort(requests, internal=True)
        await self._engine.remove_lora(number)

    def _requests(self, number: int) -> list[Any]:
        """Return the requests in flight of the adapter with this id of vLLM."""
        states = self._engine.output_processor.request_states.items()
        return [request for request, state in states if getattr(state.lora_request, "lora_int_id", None) == number]

    def _is_idle(self, slot: Slot) -> bool:
        number = slot.adapter.lora_int_id
        return not self._entering[number] and not self._requests(number)

    def _empty(self, slot: Slot) -> None:
        """Stop serving what a slot holds; its requests in flight continue."""
        if slot.is_served:
            self._models.lora_requests.pop(slot.name, None)
        slot.name = None
        slot.is_served = False

    async def _load(self, name: str, path: str) -> Any:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        self._loading = name
        try:
            answer = await self._models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path))
            if not isinstance(answer, str):
                raise AttachError(
                    f"vLLM cannot load the adapter {path}: {answer.error.message}",
                    hint="use plain LoRA (no DoRA, no bias) with a rank up to the server's --max-lora-rank",
                )
            return self._models.lora_requests[name]
        finally:
            self._loading = None

    async def add_request(
        self, original: Callable[..., Any], *args: Any, lora_request: Any = None, **kwargs: Any
    ) -> Any:
        """Pass a request on to the engine; raise ValueError if its adapter was removed in the meantime."""
        if lora_request is None:
            return await original(*args, lora_request=lora_request, **kwargs)
        number = lora_request.lora_int_id
        slot = next((slot for slot in self._slots if slot.adapter.lora_int_id == number), None)
        is_other = slot is not None and (slot.name != lora_request.lora_name or not slot.is_served)
        if number in self._removed or is_other:
            raise ValueError(f"the adapter {lora_request.lora_name} was removed or replaced: send the request again")
        self._entering[number] += 1
        try:
            return await original(*args, lora_request=lora_request, **kwargs)
        finally:
            self._entering[number] -= 1

    async def add_lora(self, original: Callable[..., Any], lora_request: Any) -> Any:
        """Let the engine load an adapter; ValueError if that would overwrite the trained one or exceed the slots."""
        name = lora_request.lora_name
        if name == self._loading:
            return await original(lora_request)
        slots = [*self._slots]
        if any(slot.name == name for slot in slots):
            raise ValueError(f"the adapter {name} is trained in place: it cannot be overwritten")
        needed = len(self._others() | {name}) + len(slots)
        if slots and needed > self._num_slots:
            number = "an adapter is" if len(slots) == 1 else f"{len(slots)} adapters are"
            raise ValueError(f"{number} trained in place, and {needed} adapters need --max-loras {needed}")
        return await original(lora_request)

    async def load(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_clients(request.lora_name)
        answer = await original(request, *args, **kwargs)
        self._is_expected = self._is_expected or self.newest() is not None
        return answer

    async def unload(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_clients(request.lora_name)
        slot = next((slot for slot in self._slots if slot.name == request.lora_name), None)
        if slot is None:
            answer = await original(request, *args, **kwargs)
        else:
            self._empty(slot)
            answer = f"Success: the adapter {request.lora_name} is not served any more"
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
        is_trained = name.startswith(ADAPTER) or any(slot.name == name for slot in self._slots)
        if lease and is_trained and not is_ours.get():
            raise HTTPException(
                409, f"a {lease.trainer} is training {name}: it cannot be loaded or unloaded until that ends"
            )
