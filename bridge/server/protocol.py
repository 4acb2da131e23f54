"""What trainer and server say to each other under `/bridge/*`, and how a rollout asks for completions.

Not covered: what it is answered, and how other servers are asked (`bridge/rollouts/openai_api.py`).
"""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError

VERSION_HEADER = "x-bridge-weight-version"
"""Response header of every generation: `3`, or `3-4` when the weights changed while it ran."""

TOKEN_HEADER = "x-bridge-token"  # noqa: S105  a name
"""Request header with the manifest's token, on vLLM's own routes: there the other header carries the server's key."""

COMPLETIONS = "/v1/bridge/completions"
"""The route for rollouts. Under `/v1`, so that vLLM's `--api-key` guards it as it does its own."""

Version = Annotated[int, Field(ge=0, lt=2**53)]
"""A version of the weights. Larger numbers are not exact in every reader of JSON."""
SEED_LIMIT = 2**63
"""vLLM keeps a seed in 64 bits with a sign."""

ADAPTER = "bridge-adapter"
"""The name under which the server serves an adapter that is trained; handed over by disk it has a version behind it."""

InFlight = Literal["keep", "wait", "abort"]
"""What a pause does with requests under way: freeze them, let them finish, or end them."""

FenceState = Literal["serving", "paused", "torn"]
"""`torn`: the process that paused the server died before it published. Nobody can tell whether it had begun to write,
so that nothing is generated until every weight has been written anew."""


Written = Literal["weights", "adapter", "nothing"]
"""What the holder of the fence writes: weights of the model, an adapter in its slot, or nothing, because it reads."""


class Body(BaseModel):
    """A frozen message that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Lease(Body):
    """The process that updates a server: one at a time, until it gives the lease back or dies."""

    holder: ProcessIdentity
    """The process."""
    run: str
    """What it is doing, for people: its run directory, or a command."""
    since: float
    """When it took the lease, in seconds since 1970."""


class Status(Body):
    """The answer of `GET /bridge/status`, and of every change of the fence."""

    model: str
    """The model as it was given to vLLM."""
    version: int
    """Version of the weights: one more with each publication since the server loaded."""
    state: FenceState
    """Where the fence stands."""
    holder: ProcessIdentity | None = None
    """The process that paused the server."""
    server: ProcessIdentity
    """The API server's process."""
    writes: Written = "weights"
    """What the holder writes, or may have left half written."""
    last_checkpoint: str | None = None
    """The folder of the last checkpoint that a writer named, absolute; None: none did since the server loaded."""
    can_sleep: bool = False
    """Whether a pause can free the KV cache."""
    lease: Lease | None = None
    """The living process that updates this server; None: any process may start to."""

    def refuse_torn(self) -> None:
        """Raise AttachError, with the command that mends it, if the weights are torn."""
        if self.state == "torn":
            raise AttachError(self.torn(), remedy=self.mending())

    def torn(self) -> str:
        """Say how the weights came to be torn, and what follows from it."""
        torn, it = ("the adapter is torn", "it") if self.writes == "adapter" else ("the weights are torn", "them")
        writer = "the process" if self.holder is None else f"process {self.holder.pid}"
        return (
            f"{torn} after version {self.version}: {writer} died inside the fence and may have left {it}"
            " half written; generation stands still"
        )

    def mending(self) -> str:
        """Return the command that mends torn weights: with the last checkpoint, if it is still there."""
        last = self.last_checkpoint
        if last and Path(last).is_dir():
            return f"bridge restore {shlex.quote(last)}"
        gone = f"{last} is gone; " if last else ""
        if self.writes == "adapter":
            return f"bridge restore ADAPTER ({gone}any saved adapter of the same modules and rank will do)"
        first = f"the first weights are in: bridge restore {shlex.quote(self.model)}"
        return f"bridge restore CHECKPOINT ({gone}any folder with weights of this model will do; {first})"


class CompletionsRequest(Body):
    """`POST /v1/bridge/completions`: sample from the whole distribution."""

    model: str
    """The served model, or an adapter."""
    prompt: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Token ids."""
    n: int = Field(ge=1)
    """Completions of it."""
    max_tokens: int = Field(ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(ge=0, allow_inf_nan=False)
    """Sampling temperature; 0: always the likeliest token."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the first completion, the next number for each other one; None: another one every time."""

    @model_validator(mode="after")
    def _fit_seeds(self) -> Self:
        if self.seed is not None and self.seed + self.n > SEED_LIMIT:
            raise ValueError(f"the seeds {self.seed} to seed + n - 1 have to be below {SEED_LIMIT}")
        return self


class LeaseRequest(Body):
    """`POST /bridge/lease`: become the one process that updates this server."""

    holder: ProcessIdentity
    """The process that is going to write."""
    run: str
    """What it is doing, for people: its run directory, or a command."""


class HolderRequest(Body):
    """`DELETE /bridge/lease`, `DELETE /bridge/adapter`, and `POST /bridge/resume`, because nothing was written."""

    holder: ProcessIdentity
    """The process that took the lease, or paused the server."""


class PauseRequest(Body):
    """`POST /bridge/pause`: stop generating, so that weights may be written."""

    holder: ProcessIdentity
    """The process that is going to write, or to read."""
    version: Version | None = None
    """The version that the caller takes for the served one; None: any."""
    in_flight: InFlight = "keep"
    """What happens to requests under way."""
    last_checkpoint: str | None = None
    """The folder that would mend the server if the holder died; None: what an earlier writer named still holds."""
    writes: Written = "weights"
    """What is going to be written."""
    takeover: bool = False
    """Take the fence although something is torn, which only he may do who is going to write all of that."""
    sleep: bool = False
    """Free the memory of the KV cache until the fence is left; it is to be free again by then."""


class PublishRequest(Body):
    """`POST /bridge/publish`: what was written is the next version. Sent again, it publishes nothing again."""

    holder: ProcessIdentity
    """The process that paused the server."""
    after: Version | None = None
    """The version that was served when the server paused; None: any, and this is no repetition."""
    version: Version | None = None
    """The least version that the publication may have; None: the next one."""


class Element(Body):
    """One element of one of vLLM's parameters on tensor-parallel rank 0."""

    parameter: str
    """vLLM's name of the parameter."""
    index: int = Field(ge=0)
    """Elements from the parameter's first, in row-major order."""


class ReadRequest(Body):
    """`POST /bridge/tensors/read`: the server's own view of single elements."""

    elements: tuple[Element, ...]
    """What to read."""


class WriteRequest(Body):
    """`POST /bridge/tensors/write`: set single elements, allowed to the fence's holder alone."""

    holder: ProcessIdentity
    """The process that paused the server."""
    elements: tuple[Element, ...]
    """What to write."""
    values: tuple[float, ...]
    """One finite value per element, exactly representable in the parameter's type."""

    @model_validator(mode="after")
    def _one_value_each(self) -> Self:
        if len(self.values) != len(self.elements):
            raise ValueError(f"{len(self.values)} values for {len(self.elements)} elements, expected one each")
        return self


class Refusal(Body):
    """The answer with status 409: what was asked for cannot be done."""

    error: str
    """What is wrong, what was found and expected."""
    remedy: str
    """One line that mends it."""
    busy: bool = False
    """Another process holds the fence, for a moment as a rule: the same request may succeed soon."""


class Values(Body):
    """The answer to a read."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    values: tuple[float, ...]
    """One value per element asked for, in the same order; NaN and infinity as strings, since JSON has neither."""


class Digests(Body):
    """The answer of `GET /bridge/tensors/digest`."""

    digests: dict[str, str]
    """vLLM's parameter -> digest of its bytes (`bridge.weights.digest`)."""


class Finiteness(Body):
    """The answer of `GET /bridge/tensors/finite`."""

    num_tensors: int
    """Parameters, and matrices of adapter slots, that were looked at."""
    not_finite: tuple[str, ...]
    """Those with NaN or infinity in them."""

    def found(self) -> str:
        """Say what was found."""
        if not self.not_finite:
            return f"every number in {self.num_tensors} tensors is finite"
        names = ", ".join(self.not_finite[:3])
        return f"NaN or infinity in {len(self.not_finite)} of {self.num_tensors} tensors, the first: {names}"


class AdapterRequest(Body):
    """`POST /bridge/adapter`: serve an adapter from a slot that stays put, so that the caller can write it in place."""

    holder: ProcessIdentity
    """The process that is going to write it."""
    name: str = Field(min_length=1)
    """The name under which requests ask for it, as they ask for a model; taken over if it is served already."""
    path: str = Field(pattern=r"^/[^\x00]+$")
    """Folder with `adapter_config.json` on the server's host, absolute."""


class AdapterSlot(Body):
    """The answer to an `AdapterRequest`."""

    name: str
    """The name under which the adapter is served."""
    slot: int = Field(ge=0)
    """Which of the slots in the manifest's `lora_slots` holds it."""
