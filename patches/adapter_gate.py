"""Keep away from the engine what would take a trained adapter's slot, or stop the engine because that slot is taken.

Symptom: with a pinned adapter, a request for an adapter too many stops the whole engine.
Cause: vLLM 0.26 to 0.33 schedules by the number of slots, pinned or not, and finds out in the middle of a step that
none is free (`LRUCache.popitem`: "All items are pinned"). So it is for a request whose adapter was just taken out: the
worker would load it again from disk.
Why this is safe: two methods of this one engine client are wrapped, and what they refuse could not have been served. A
load that is refused is answered by vLLM's own route, in the gate's words.

Not covered: taking adapters in and out (`adapter.py`); vLLM's development routes, which can do anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.errors import AttachError


class AdapterGate:
    """Stands before `add_request` and `add_lora` of one engine client."""

    def __init__(self, engine: Any, models: Any, num_slots: int) -> None:
        self._models = models
        self._num_slots = num_slots
        self._trained: str | None = None
        self._is_loading = False
        self._retired: set[int] = set()
        self._add_request, self._add_lora = engine.add_request, engine.add_lora
        engine.add_request, engine.add_lora = self.add_request, self.add_lora

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Let the adapter `name` in, and guard it from then on; nothing is guarded if the block fails."""
        self._trained, self._is_loading = name, True
        try:
            yield
        except BaseException:
            self._trained = None
            raise
        finally:
            self._is_loading = False

    def forget(self) -> None:
        """Guard no adapter any more."""
        self._trained = None

    def retire(self, number: int) -> None:
        """Refuse every further request for the adapter with vLLM's number `number`."""
        self._retired.add(number)

    def refuse_unless_slots_remain(self, name: str) -> None:
        """Raise AttachError unless `name` and all served adapters but the trained one have a slot each."""
        served = {*self._models.lora_requests, name} - ({self._trained} - {name})
        if len(served) > self._num_slots:
            raise AttachError(
                f"the server has {self._num_slots} LoRA slots for {len(served)} adapters ({', '.join(sorted(served))}),"
                " and the slot of one that is trained cannot be lent to another",
                remedy=f"restart it with: bridge serve-vllm ... -- --max-loras {len(served)}",
            )

    async def add_request(self, *args: Any, lora_request: Any = None, **kwargs: Any) -> Any:
        """Pass a request on to the engine, unless its adapter was taken out while the request was on its way.

        Raises:
            ValueError: it was.
        """
        if lora_request is not None and lora_request.lora_int_id in self._retired:
            raise ValueError(f"the adapter {lora_request.lora_name} was taken out or replaced: send the request again")
        return await self._add_request(*args, lora_request=lora_request, **kwargs)

    async def add_lora(self, lora_request: Any) -> Any:
        """Pass an adapter on to be loaded, unless it would write over the trained one or leave too few slots.

        Raises:
            ValueError: it would.
        """
        name, trained = lora_request.lora_name, self._trained
        served = {*self._models.lora_requests, name, *([trained] if trained else [])}
        if name == trained and not self._is_loading:
            raise ValueError(f"the adapter {name} is being trained in place: it cannot be loaded over")
        if trained and len(served) > self._num_slots:
            raise ValueError(
                f"{trained} is trained in place, and {len(served)} adapters need --max-loras {len(served)}"
            )
        return await self._add_lora(lora_request)
