"""Encode the objects that ranks exchange, and the outcomes of their phases, as JSON, which cannot execute code.

Numbers are preserved bit for bit. In addition to JSON's own types, messages support tuples, bytes, dictionaries with
any keys, paths, tensors, and the dataclasses and pydantic models of the `bridge` package. Long tuples of numbers are
packed: encoding a step of 64 x 4096 tokens takes milliseconds. A field whose metadata is `NOT_SENT` is not sent.

Source: "Using distributed features" in PyTorch's SECURITY.md.
"""

import array
import base64
import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from bridge.errors import BridgeError, RankError, UsageError
from bridge.types import NOT_SENT

PLAIN = {str, int, float, bool, type(None)}
"""Types that JSON represents directly."""
CODES = {"ints": "q", "floats": "d"}
"""Tags of packed tuples, and their type codes in `array`."""
LEAST_PACKED = 16
PACKAGE = "bridge."
FIELDS_SET = "model_fields_set"
"""pydantic's attribute with the names of the fields that were set explicitly."""
AGREED = "was_agreed"
"""Attribute of an error that ranks raise together: the number of these ranks."""
OF_TENSORS = "is_of_tensors"
"""Attribute of an error in a tensor exchange, for which the failed rank may still report the cause."""
INTERRUPTED = "interrupted"
gather_bytes: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a phase on one rank."""

    result: Any = None
    error: BaseException | None = None
    """A BridgeError or an interrupt, which every rank can raise."""
    fault: str = ""
    """Any other error, on one line."""
    raised: BaseException | None = None
    """The original exception; set only on the rank that raised it."""
    message: bytes = b"[null]"
    """The encoded result."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        if isinstance(error, BridgeError):
            return cls(error=error, raised=error)
        if isinstance(error, KeyboardInterrupt):
            return cls(error=KeyboardInterrupt(), raised=error)
        return cls(fault=f"{type(error).__name__}: {error}", raised=error)

    def dumps(self) -> bytes:
        """Encode the error on the first line, and the result on the second."""
        error = self.error
        kind = INTERRUPTED if isinstance(error, KeyboardInterrupt) else ""
        text = self.fault
        hint = ""
        if isinstance(error, BridgeError):
            kind = name_of(type(error))
            text = error.message
            hint = error.hint
        return dumps([kind, text, hint]) + b"\n" + self.message

    @classmethod
    def loads(cls, message: bytes) -> Self:
        line, _, result = message.partition(b"\n")
        kind, text, hint = loads(line)
        if kind == INTERRUPTED:
            return cls(error=KeyboardInterrupt())
        if kind:
            return cls(error=_error(kind, text, hint))
        return cls(fault=text, result=loads(result)[0])

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.fault)

    @property
    def kind(self) -> int:
        """How likely this error is the cause of the other ranks' errors: the lowest number is the cause."""
        if isinstance(self.error, KeyboardInterrupt):
            return 0
        return 2 if isinstance(self.error, RankError) else 1


def dumps(value: object) -> bytes:
    """Encode `value` as JSON.

    Raises:
        UsageError: `value` contains an object that cannot be sent.
    """
    return json.dumps(_encoded(value)).encode()


def loads(message: bytes) -> Any:
    """Decode a message.

    Raises:
        RankError: `dumps` did not produce this message.
    """
    try:
        return _decoded(json.loads(message))
    except (ValueError, TypeError, LookupError, ImportError, AttributeError) as error:
        raise RankError(
            f"a message from another rank cannot be read: {type(error).__name__}: {error}",
            hint="a host runs different code, or a foreign process connects to this run's ports: use a trusted network",
        ) from error


def _error(kind: str, message: str, hint: str) -> BridgeError:
    """Recreate the error of a rank; `kind` is the name of its class."""
    error_class = _class(kind)
    if not issubclass(error_class, BridgeError):
        raise RankError(f"a message from another rank names an unknown {kind}", hint="run the same code on all hosts")
    return error_class(message, hint=hint)


def exchange(mine: bytes, group: "dist.ProcessGroup", size: int) -> list[bytes]:
    """Send `mine` to the `size` ranks of `group`, and return what each rank sent, in rank order."""
    lengths = torch.empty(size, dtype=torch.int64)
    gather_bytes(lengths, torch.tensor([len(mine)]), group=group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    whole = torch.empty(size * longest, dtype=torch.uint8)
    gather_bytes(whole, padded, group=group)
    rows = zip(whole.view(size, longest), lengths.tolist(), strict=True)
    return [row[:length].numpy().tobytes() for row, length in rows]


def _encoded(value: Any) -> Any:
    """Convert to JSON's own types: scalars and lists of scalars unchanged, everything else as {tag: content}."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        return value if set(map(type, value)) <= PLAIN else [*map(_encoded, value)]
    if kind is tuple:
        return _encoded_tuple(value)
    for base, tag, encode in ENCODERS:
        if isinstance(value, base):
            return {tag: encode(value)}
    if not kind.__module__.startswith(PACKAGE) or (fields := _fields(value)) is None:
        raise UsageError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks: {repr(value)[:80]}",
            hint="with several GPUs, a problem may hold only text, numbers, true, false, null, lists and dictionaries",
        )
    return {name_of(kind): {name: _encoded(item) for name, item in fields.items()}}


def _encoded_tuple(value: tuple[Any, ...]) -> dict[str, Any]:
    kinds = set(map(type, value))
    if len(value) >= LEAST_PACKED:
        for name, kind in (("ints", int), ("floats", float)):
            if kinds == {kind}:
                try:
                    return {name: _text(array.array(CODES[name], value).tobytes())}
                except OverflowError:  # a number that does not fit into 64 bits
                    break
        if kinds == {tuple} and len({*map(len, value)}) == 1 and value[0]:
            return {"columns": [_encoded(column) for column in zip(*value, strict=True)]}
    return {"tuple": [*value] if kinds <= PLAIN else [*map(_encoded, value)]}


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, BaseModel):
        return {**dict(value), FIELDS_SET: sorted(value.model_fields_set)}
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if field.init and field.metadata != NOT_SENT]
        return {field.name: getattr(value, field.name) for field in fields}
    return None


def _decoded(value: Any) -> Any:
    if type(value) is list:
        return value if set(map(type, value)) <= PLAIN else [*map(_decoded, value)]
    if type(value) is not dict:
        return value
    ((tag, content),) = value.items()
    if tag in DECODERS:
        return DECODERS[tag](content)
    record = _class(tag)
    fields = {name: _decoded(item) for name, item in content.items()}
    if issubclass(record, BaseModel):
        return record.model_construct(_fields_set={*fields.pop(FIELDS_SET)}, **fields)
    return record(**fields)


def _unpacked(tag: str, content: str) -> tuple[Any, ...]:
    return tuple(array.array(CODES[tag], base64.b64decode(content)))


def _encoded_tensor(tensor: Tensor) -> list[Any]:
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), [*tensor.shape], _text(content.tobytes())]


def _decoded_tensor(content: list[Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, content[0].removeprefix("torch."))
    data = bytearray(base64.b64decode(content[2]))
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(tuple(content[1]))


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type[Any]:
    """Return the dataclass, model or error with this name from `bridge`; nothing else can be instantiated."""
    module, _, attribute = name.partition(":")
    if not module.startswith(PACKAGE):
        raise ValueError(f"{name} is not a Bridge class")
    record = getattr(importlib.import_module(module), attribute)
    if not (
        isinstance(record, type) and (dataclasses.is_dataclass(record) or issubclass(record, BaseModel | BridgeError))
    ):
        raise ValueError(f"{name} is not a dataclass, pydantic model or error")
    return record


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


ENCODERS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (dict, "dict", lambda value: [[_encoded(key), _encoded(item)] for key, item in value.items()]),
    (Path, "path", str),
    (bytes, "bytes", _text),
    (Tensor, "tensor", _encoded_tensor),
)
DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "dict": lambda content: {_decoded(key): _decoded(item) for key, item in content},
    "path": Path,
    "bytes": base64.b64decode,
    "tensor": _decoded_tensor,
    "tuple": lambda content: tuple(_decoded(content)),
    "columns": lambda content: tuple(zip(*_decoded(content), strict=True)),
    "ints": lambda content: _unpacked("ints", content),
    "floats": lambda content: _unpacked("floats", content),
}
