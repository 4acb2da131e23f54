"""The messages between trainer and server under `/bridge/*`, and a rollout's request for completions."""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Base64Bytes, ConfigDict, Field, model_validator

from bridge.core.process import ProcessIdentity
from bridge.errors import AttachError
from bridge.server.manifest import Record

VERSION_HEADER = "x-bridge-weight-version"
"""Response header of every generation: `3`, or `3-4` if the weights changed while it ran."""
TOKEN_HEADER = "x-bridge-token"  # noqa: S105  a header name
"""Request header for the manifest's token on vLLM's own routes, where `authorization` carries the server's key."""
BRIDGE_ROUTES = "/bridge/"
"""Routes that take the manifest's token instead of the API key."""
TRANSFER_FLAG = ("--weight-transfer-config", '{"backend": "nccl"}')
"""vLLM flag that lets it receive weights through its NCCL engine."""
TRANSFER = "/bridge/transfer"
"""The only route under `BRIDGE_ROUTES` whose requests are not idempotent."""
COMPLETIONS = "/v1/bridge/completions"
"""The route for rollouts. vLLM's `--api-key` guards everything under `/v1`."""
ADAPTER = "bridge-adapter"
"""Name of the trained adapter, with a version appended if it is published through disk."""
SEED_LIMIT = 2**63
"""vLLM stores a seed in a signed 64-bit integer."""

Version = Annotated[int, Field(ge=0, lt=2**53)]
"""A version of the weights. Some JSON parsers cannot represent larger numbers exactly."""
InFlight = Literal["keep", "wait", "abort"]
"""How a pause treats in-flight requests: freeze, drain or abort them."""
FenceState = Literal["serving", "paused", "torn"]
"""`torn`: a process died between pause and publication and may have written; all weights must be rewritten."""
Written = Literal["weights", "adapter", "nothing"]
"""What the holder of the fence writes: model weights, an adapter in its slot, or nothing (it only reads)."""

SentArray = tuple[Literal["bfloat16", "float16", "float32", "int64"], tuple[int, ...], Base64Bytes]
"""A tensor: dtype, shape and values."""


class Holder(Record):
    """Processes that update or read a server as one unit: the ranks of a trainer, or a single process."""

    processes: tuple[ProcessIdentity, ...] = Field(min_length=1)
    """The processes, leader first. Each may call the server on the holder's behalf."""

    @classmethod
    def current(cls) -> Self:
        return cls(processes=(ProcessIdentity.current(),))

    @property
    def pid(self) -> int:
        """The leader's process id, used in messages."""
        return self.processes[0].pid

    def is_visible(self) -> bool:
        """Return whether the caller would notice if any of the processes exited."""
        return all(process.is_visible() for process in self.processes)

    def all_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def none_alive(self) -> bool:
        return not any(process.is_alive() for process in self.processes)


class Lease(Record):
    """The right to update a server; a holder keeps it until it returns it or all of its processes exit."""

    holder: Holder
    run: str
    """The run directory or the command, used in messages."""

    @property
    def trainer(self) -> str:
        """Description of the holder for messages."""
        return f"trainer (pid {self.holder.pid}, run {self.run})"

    def refusal(self) -> AttachError:
        """Return the error for a second trainer that requests the lease."""
        stop = f"stop it (kill -INT {self.holder.pid})"
        return AttachError(
            f"another {self.trainer} is updating this server",
            hint=f"wait for it to finish, {stop}, or start a second server on another port",
        )


class Capabilities(Record):
    """Capabilities of a server; they do not change while it runs."""

    can_sleep: bool = False
    """Whether a pause can free the KV cache."""
    kv_tokens: int | None = None
    """Capacity of the KV cache in tokens; None: unknown."""
    can_keep_kv: bool = True
    """Whether in-flight requests may keep their cached keys and values during an update."""
    experts: tuple[int, int] | None = None
    """(Layers for which the server reports each token's experts, experts per layer); None: it does not report them."""
    can_receive_weights: bool = False
    """Whether it was started with vLLM's weight transfer over NCCL."""


class Status(Capabilities):
    """The response to `GET /bridge/status`, and to every change of the fence."""

    model: str
    """The model argument that vLLM got."""
    version: int
    """Version of the weights; every publication increments it."""
    state: FenceState
    holder: Holder | None = None
    """The process that paused the server."""
    server: ProcessIdentity
    """The API server's process."""
    writes: Written = "weights"
    """What the holder is writing, or may have left half-written."""
    last_checkpoint: str | None = None
    """Absolute path of the last checkpoint that a writer reported; None: none since the server started."""
    lease: Lease | None = None
    """The lease of a running trainer; None: no trainer holds it."""

    def refuse_torn(self) -> None:
        if self.state == "torn":
            raise AttachError(self.torn(), hint=self.hint())

    def torn(self) -> str:
        """Return a message that says what is torn, and why."""
        part = "adapter" if self.writes == "adapter" else "weights"
        writer = "the process" if self.holder is None else f"process {self.holder.pid}"
        return (
            f"the {part} may be half-written: {writer} died inside the fence after version {self.version}, and the"
            " server generates nothing until a checkpoint is restored"
        )

    def hint(self) -> str:
        """Return the command that repairs the server, with the last checkpoint if it still exists."""
        last = self.last_checkpoint
        if last and Path(last).is_dir():
            return f"bridge restore {shlex.quote(last)}"
        missing = f"{last} no longer exists; " if last else ""
        if self.writes == "adapter":
            return f"bridge restore ADAPTER ({missing}any saved adapter with the same modules and rank works)"
        first = f"for the initial weights: bridge restore {shlex.quote(self.model)}"
        return f"bridge restore CHECKPOINT ({missing}any folder with weights of this model works; {first})"


class HolderRequest(Record):
    """`DELETE /bridge/lease`, `DELETE /bridge/adapter`, and `POST /bridge/resume` if nothing was written."""

    holder: Holder
    """The caller, which takes or holds the lease, or pauses or has paused the server."""
    client: str = ""
    """Client within the holder's process, which may have several policies; empty if it has only one."""


class LeaseRequest(HolderRequest):
    """`POST /bridge/lease`: become the only trainer that updates this server."""

    run: str
    """The run directory or the command, used in messages."""


class PauseRequest(HolderRequest):
    """`POST /bridge/pause`: stop generating, so that weights can be written or read."""

    version: Version | None = None
    """The version that the caller expects to be served; None: any."""
    in_flight: InFlight = "keep"
    """How the pause treats in-flight requests."""
    last_checkpoint: str | None = None
    """The folder to restore if the holder dies; None: the last one that an earlier writer reported."""
    writes: Written = "weights"
    """What the holder will write."""
    takeover: bool = False
    """Take the fence even if weights are torn. Only for a caller that rewrites all of them."""
    sleep: bool = False
    """Free the KV cache's memory until the server resumes."""
    keep_kv: bool = False
    """Let frozen requests continue with their cached keys and values; otherwise vLLM recomputes these."""


class PublishRequest(HolderRequest):
    """`POST /bridge/publish`: publish what was written as the next version. Repeating the request has no effect."""

    after: Version | None = None
    """The version that was served when the server paused; None: any, and this request is not a repetition."""
    version: Version | None = None
    """The version to publish, or the next one if that is higher; None: the next one."""


class Element(Record):
    """One element of one of vLLM's parameters."""

    parameter: str
    """vLLM's name for the parameter."""
    index: int = Field(ge=0)
    """Row-major index within the parameter."""
    part: int = Field(default=0, ge=0)
    """vLLM's tensor-parallel rank that holds the element."""


class ReadRequest(Record):
    """`POST /bridge/tensors/read`: return single elements as the server sees them."""

    elements: tuple[Element, ...]
    """Elements to read."""


class WriteRequest(HolderRequest):
    """`POST /bridge/tensors/write`: set single elements; only for the holder of the fence."""

    elements: tuple[Element, ...]
    """Elements to write."""
    values: tuple[float, ...]
    """One finite value per element, exactly representable in the parameter's dtype."""

    @model_validator(mode="after")
    def _check_num_values(self) -> Self:
        if len(self.values) != len(self.elements):
            raise ValueError(f"{len(self.values)} values for {len(self.elements)} elements, expected one each")
        return self


class Values(Record):
    """The response to a read request."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    values: tuple[float, ...]
    """One value per requested element, in the same order; NaN and infinity as strings, since JSON has neither."""


class Digests(Record):
    """The response to `GET /bridge/tensors/digest`."""

    digests: dict[str, str]
    """vLLM's parameter -> digest on one rank (`rank_parts.digest`), or with `?quantized=true` that of its FP8 copy."""


class Finiteness(Record):
    """The response to `GET /bridge/tensors/finite`."""

    num_tensors: int
    """Number of scanned tensors: parameters and matrices of adapter slots."""
    not_finite: tuple[str, ...]
    """Parameters that contain NaN or infinity."""

    def found(self) -> str:
        if not self.not_finite:
            return f"every number in {self.num_tensors} tensors is finite"
        names = ", ".join(self.not_finite[:3])
        return f"NaN or infinity in {len(self.not_finite)} of {self.num_tensors} tensors, the first: {names}"


class AdapterRequest(HolderRequest):
    """`POST /bridge/adapter`: serve an adapter from a pinned slot, so that the caller can write into it."""

    name: str = Field(min_length=1)
    """Model name for requests; replaces an adapter that already has this name."""
    path: str = Field(pattern=r"^/[^\x00]+$")
    """Absolute path of a folder with `adapter_config.json` on the server's host."""


class AdapterSlot(Record):
    """The response to an `AdapterRequest`, and to `POST /bridge/adapter/reserve`."""

    slot: int = Field(ge=0)
    """Index in the manifest's `lora_slots`."""


class SlotsRequest(HolderRequest):
    """`POST /bridge/adapter/slots`: open all free slots for adapters that take turns."""

    path: str = Field(pattern=r"^/[^\x00]+$")
    """Absolute path of a folder with an adapter that all of them hold at first."""


class AdapterSlots(Record):
    """The response to a `SlotsRequest`."""

    slots: tuple[int, ...]
    """Indices in the manifest's `lora_slots`."""


class SlotRequest(HolderRequest):
    """`POST /bridge/adapter/reserve`, an open slot to be written, and `POST /bridge/adapter/serve`, when it is."""

    name: str = Field(min_length=1)
    """Model name for requests to the slot's new contents; it was never used for other contents."""
    keep: tuple[str, ...] = ()
    """Names whose slots are not reserved: the trainer will send more requests to them."""


class CompletionsRequest(Record):
    """`POST /v1/bridge/completions`: sample from the full distribution, or from the tokens that filters keep."""

    model: str
    """Name of the served model or of an adapter."""
    prompt: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Token ids, including every token of an image."""
    images: dict[str, SentArray] = Field(default_factory=dict)
    """Outputs of the model's image processor, by name."""
    n: int = Field(ge=1)
    """Number of completions."""
    max_tokens: int = Field(ge=1)
    """Maximum length of a completion in tokens."""
    temperature: float = Field(ge=0, allow_inf_nan=False)
    """Sampling temperature; 0: always the likeliest token."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many of the likeliest tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of likeliest tokens whose total probability reaches this value."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep the tokens whose probability is at least this fraction of the likeliest token's."""
    experts: int | None = Field(default=None, ge=0)
    """Report the experts of every token except the first `experts` tokens of the prompt; None: report none."""
    prompt_logprobs: bool = False
    """Report the log-probability of each prompt token, recomputed for each completion."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, and remain part of it."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further tokens that end a completion and are its last token; the text does not include special tokens."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the first completion, incremented for each further one; None: a random seed."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.seed is not None and self.seed + self.n > SEED_LIMIT:
            raise ValueError(f"the seeds {self.seed} to seed + n - 1 must be below {SEED_LIMIT}")
        if (self.experts or 0) >= len(self.prompt):
            raise ValueError(f"experts is {self.experts}, expected less than the prompt's {len(self.prompt)} tokens")
        return self


class Refusal(Record):
    """The response with status 409: the server refuses the request."""

    error: str
    """What went wrong, the value found and the value expected."""
    hint: str
    """The fix, in one line."""
    busy: bool = False
    """Another process holds the fence, usually only briefly: the same request may succeed soon."""
