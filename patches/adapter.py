"""Serve the one adapter that a trainer writes in place: loaded and pinned by vLLM, in a slot that stays put.

vLLM writes a slot when an adapter is activated in it, and never again while the adapter stays active: a request under
its name only touches it (`LRUCacheWorkerLoRAManager.add_adapter`). Pinned, it is not evicted. What could still take its
slot is refused by the gate (`adapter_gate.py`).

Not covered: where the slots lie (`lora_slots.py`), writing them, which the trainer does behind the fence.
"""

import asyncio
from pathlib import Path
from typing import Any

from bridge.errors import AttachError
from patches.adapter_gate import AdapterGate

CONFIG_NAME = "adapter_config.json"


class ServedAdapter:
    """The adapter with a slot of its own; a second one takes the place of the first."""

    def __init__(self, engine: Any, models: Any) -> None:
        self._engine = engine
        self._models = models
        self._gate: AdapterGate | None = None
        self._seated: Any = None
        self._lock = asyncio.Lock()

    async def serve(self, name: str, path: str) -> int:
        """Serve the adapter in folder `path` as `name`, instead of the one that was seated before; return its slot.

        Whatever was served as `name` is taken out first: its requests under way end, and every cached key and value is
        dropped, because vLLM finds those of an adapter again by its name (since 0.32 by its path too).

        Raises:
            AttachError: no LoRA, no slot to spare, no adapter there, or vLLM refuses to load it.
        """
        async with self._lock:
            gate = self._gate or AdapterGate(self._engine, self._models, self._num_slots())
            self._gate = gate
            _refuse_without_files(path)
            gate.refuse_unless_slots_remain(name)
            earlier = (self._seated, self._models.lora_requests.get(name))
            for number, adapter in {_number(adapter): adapter for adapter in earlier}.items():
                if number is not None:
                    await self._take_out(gate, adapter, number)
            self._seated = None
            await self._drop_caches()
            with gate.loading(name):
                self._seated = await self._load(name, path)
            return await self._pin(name, self._seated.lora_int_id)

    async def release(self) -> None:
        """Take out the adapter that is seated, if there is one: its slot is vLLM's own again."""
        async with self._lock:
            if self._gate is not None and self._seated is not None:
                await self._take_out(self._gate, self._seated, self._seated.lora_int_id)
                self._gate.forget()
                self._seated = None

    def _num_slots(self) -> int:
        config = self._engine.vllm_config.lora_config
        if config is None:
            raise AttachError(
                "the server was started without LoRA, so that it has no slot for an adapter",
                remedy="restart it with: bridge serve-vllm --max-lora-rank 16",
            )
        return int(config.max_loras)

    async def _take_out(self, gate: AdapterGate, adapter: Any, number: int) -> None:
        self._models.lora_requests.pop(adapter.lora_name, None)
        gate.retire(number)
        states = self._engine.output_processor.request_states
        requests = [request for request, state in states.items() if _number(state.lora_request) == number]
        if requests:
            await self._engine.abort(requests, internal=True)
        await self._engine.remove_lora(number)

    async def _drop_caches(self) -> None:
        if not await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise AttachError(
                "vLLM refuses to drop its prefix cache: keys and values of an earlier adapter would be served",
                remedy="try again when no other request runs, or restart the server",
            )

    async def _load(self, name: str, path: str) -> Any:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        answer = await self._models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path))
        if not isinstance(answer, str):
            raise AttachError(
                f"vLLM does not load the adapter {path}: {answer.error.message}",
                remedy="a rank up to the server's --max-lora-rank, and nothing but plain LoRA: no DoRA, no bias",
            )
        return self._models.lora_requests[name]

    async def _pin(self, name: str, number: int) -> int:
        await self._engine.pin_lora(number)
        slots = await self._engine.collective_rpc("bridge_adapter_slot", args=(number,))
        if None in slots or len(set(slots)) != 1:
            raise AttachError(
                f"the ranks hold the adapter {name} in slots {slots}, expected one and the same",
                remedy="restart the server",
            )
        return int(slots[0])


def _number(adapter: Any) -> int | None:
    return None if adapter is None else int(adapter.lora_int_id)


def _refuse_without_files(path: str) -> None:
    if not (Path(path) / CONFIG_NAME).is_file():
        raise AttachError(
            f"there is no adapter in {path}, as the server sees it: no {CONFIG_NAME}",
            remedy=f"ls -l {path}; the server must be able to read it, on its own host",
        )
