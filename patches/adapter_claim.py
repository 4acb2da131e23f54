"""Keep the adapter of a training from anybody else: while a trainer has the lease, only it loads and unloads one.

vLLM's routes for adapters let every client take out the adapter that is trained, or load another under such a name.
The trainer's own requests carry the manifest's token, by which `guard.py` knows them.

Not covered: the slot of an adapter in memory (`adapter_gate.py`).
"""

from typing import Any

from fastapi import HTTPException

from bridge.server.protocol import ADAPTER
from patches import guard
from patches.server_lease import ServerLease

CONFLICT, UNAVAILABLE = 409, 503


class AdapterClaim:
    """Stands before the loading and unloading of one server's list of models."""

    def __init__(self, models: Any, lease: ServerLease) -> None:
        self._models, self._lease = models, lease
        self._is_expected = False
        """Whether an adapter of a training was loaded, and not given up since."""
        self._load, self._unload = models.load_lora_adapter, models.unload_lora_adapter
        models.load_lora_adapter, models.unload_lora_adapter = self.load, self.unload

    async def load(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass a request on, unless a stranger names an adapter of a live training.

        Raises:
            HTTPException: it is refused.
        """
        self._refuse_strangers(request.lora_name)
        answer = await self._load(request, *args, **kwargs)
        self._is_expected = self._is_expected or self.served() is not None
        return answer

    async def unload(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass a request on, unless a stranger names an adapter of a live training.

        Raises:
            HTTPException: it is refused.
        """
        self._refuse_strangers(request.lora_name)
        answer = await self._unload(request, *args, **kwargs)
        if self._lease.held is None and self.served() is None:
            self.give_up()
        return answer

    def give_up(self) -> None:
        """Expect no adapter any more: requests that name no model are the model's own."""
        self._is_expected = False

    def served(self) -> str | None:
        """Return the name of the newest adapter of a training, if one is served."""
        return next((name for name in reversed(list(self._models.lora_requests)) if name.startswith(ADAPTER)), None)

    def expected(self) -> str | None:
        """Return the name of the adapter for requests that name no model; None: the model itself.

        Raises:
            HTTPException: an adapter is trained, and none is served at this moment.
        """
        name = self.served()
        if name is None and self._lease.held is None:  # the trainer that was to load one has ended
            self.give_up()
        if name is None and self._is_expected:
            raise HTTPException(
                UNAVAILABLE,
                "the adapter that is trained is not served at this moment: send the request again, or name a model",
            )
        return name

    def _refuse_strangers(self, name: str) -> None:
        held = self._lease.held
        if held is not None and name.startswith(ADAPTER) and not guard.is_ours.get():
            raise HTTPException(
                CONFLICT,
                f"a trainer (pid {held.holder.pid}, run {held.run}) is training {name}: it cannot be loaded or unloaded"
                " until that ends",
            )
