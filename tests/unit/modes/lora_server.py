"""A server that accepts adapters: the routes of Bridge's fence and of vLLM's adapters, over a toy server's slots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bridge.core.process import ProcessIdentity
from bridge.server.protocol import FenceState, Refusal, Status, Written
from tests.unit import toy_server
from tests.unit.checks_sample import dead_holder
from tests.unit.http_server import Answer, HttpRequest, as_json
from tests.unit.toy_server import ToyServer

SLOT = 1
"""The slot used for the adapter; not the first, so that the index matters."""


class LoraServer:
    """Records requests in order, and holds adapters as vLLM does: in a slot, or by name."""

    def __init__(self, toy: ToyServer) -> None:
        self.toy, self.version = toy, 4
        self.state: FenceState = "serving"
        self.writes: Written = "adapter"
        self.adapters: dict[str, dict[str, Tensor]] = {}
        """Adapters served by name, other than the one in the slot."""
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        """The last request body of each call."""
        self.refuses: dict[str, Answer | None] = {}
        """Responses that override those of some calls."""
        self.seats: Callable[[float], float] = lambda value: value
        """Transforms each number that is written to a slot."""

    def __call__(self, request: HttpRequest) -> Answer | None:
        call = f"{request.method} {request.path.removeprefix('/bridge/').removeprefix('/v1/')}"
        self.calls.append(call)
        self.bodies[call] = request.body
        if call in self.refuses:
            return self.refuses[call]
        return self._answer(call, request.body)

    def _answer(self, call: str, body: Any) -> Answer:
        match call:
            case "GET models":
                return as_json({"data": [{"id": "tiny"}, *({"id": name} for name in self.adapters)]})
            case "POST load_lora_adapter":
                self.adapters[body["lora_name"]] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
                return Answer("Success")
            case "POST unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return Answer("Success")
            case "POST adapter":
                toy_server.fill_slot(self.toy, SLOT, Path(body["path"]))
                for a, _ in self.toy.slots.values():
                    a[SLOT].copy_(a[SLOT] * self.seats(1.0))
                return as_json({"slot": SLOT})
            case "POST pause" if self.state == "torn" and not body["takeover"]:
                status = self.status()
                return refusal(status.torn(), status.hint())
            case "POST publish":
                self.version, self.state = max(self.version + 1, body["version"] or 0), "serving"
        return as_json(self.status().model_dump(mode="json"))

    def status(self) -> Status:
        return Status(
            model="tiny", version=self.version, state=self.state, server=self.toy.manifest.server, writes=self.writes,
            can_sleep=True, holder=dead_holder() if self.state == "torn" else None,
        )  # fmt: skip


def refusal(error: str, hint: str) -> Answer:
    return as_json(Refusal(error=error, hint=hint).model_dump(), 409)


def me() -> ProcessIdentity:
    return ProcessIdentity.current()
