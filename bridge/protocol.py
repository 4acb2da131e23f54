"""What trainer and server say to each other under `/bridge/*`.

Not covered: generation, which is vLLM's own OpenAI-compatible API.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bridge.process import ProcessIdentity

VERSION_HEADER = "x-bridge-weight-version"
"""Response header of every generation: `3`, or `3-4` when the weights changed while it ran."""

InFlight = Literal["keep", "wait", "abort"]
"""What a pause does with requests under way: freeze them, let them finish, or end them."""

FenceState = Literal["serving", "paused", "torn"]
"""`torn`: the process that paused the server died before it published."""


class Body(BaseModel):
    """A frozen message that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Status(Body):
    """The answer of `GET /bridge/status`, and of every change of the fence."""

    model: str
    """The model as it was given to vLLM."""
    version: int
    """Number of updates published since the server loaded."""
    state: FenceState
    """Where the fence stands."""
    holder: ProcessIdentity | None = None
    """The process that paused the server."""
    server: ProcessIdentity
    """The API server's process."""


class PauseRequest(Body):
    """`POST /bridge/pause`: stop generating, so that weights may be written."""

    holder: ProcessIdentity
    """The process that is going to write."""
    in_flight: InFlight = "keep"
    """What happens to requests under way."""


class ReleaseRequest(Body):
    """`POST /bridge/publish` (weights were written) or `/bridge/resume` (none were)."""

    holder: ProcessIdentity
    """The process that paused the server."""


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
    """One value per element, exactly representable in the parameter's type."""


class Refusal(Body):
    """The answer with status 409: what was asked for cannot be done."""

    error: str
    """What is wrong, what was found and expected."""
    remedy: str
    """One line that mends it."""


class Values(Body):
    """The answer to a read."""

    values: tuple[float, ...]
    """One value per element asked for, in the same order."""


class Digests(Body):
    """The answer of `GET /bridge/tensors/digest`."""

    digests: dict[str, str]
    """vLLM's parameter -> digest of its bytes (`bridge.weights.digest`)."""
