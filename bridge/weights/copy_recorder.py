"""Record where a loader would copy a model's parameters within a server's, without copying anything.

The model's parameters may be on the meta device. The loader slices views of them and of the server's parameters, and
copies one into the other; the storage, offset and strides of both identify the elements. A computed tensor is not a
view: a server parameter that is filled from one has no owner, and `layout.py` refuses it by name.

Not covered: loaders that read weight values (they raise), parameters that are replaced instead of being copied into.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.errors import UnsupportedModelError
from bridge.weights.layout import OTHER_MODES, Copy

_aten = torch.ops.aten


class ViewsOnly(TorchDispatchMode):
    """Turn clones of `tensors` into views, so that code that only slices them copies nothing."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = tensors  # keeps the storages alive, since a freed address could be reused
        self._storages = {storage_of(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, or return an alias of its argument instead of a duplicate."""
        kwargs = kwargs or {}
        duplicates = func in (_aten.clone.default, _aten._to_copy.default)
        if duplicates and kwargs.get("dtype") in {None, args[0].dtype} and storage_of(args[0]) in self._storages:
            return _aten.alias.default(args[0])
        return func(*args, **kwargs)


class _Written(NamedTuple):
    """A part of a source that was copied, and the target it was copied to."""

    source: str
    part: Tensor
    target: Tensor


class CopyRecorder(ViewsOnly):
    """Record copies out of `sources` instead of executing them; neither `sources` nor `targets` change.

    Each source has a separate storage; targets may share one.
    """

    def __init__(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        super().__init__([*sources.values()])
        self._sources = {storage_of(tensor): name for name, tensor in sources.items()}
        assert len(self._sources) == len(sources), "two sources in one storage"
        self._targets = {storage_of(tensor): tensor for tensor in targets.values()}
        self._written: dict[int, list[_Written]] = {}

    def copies(self, targets: Mapping[str, Tensor]) -> dict[str, list[Copy]]:
        """Return the copies of each source that are in `targets`, which may include tensors that the loader created."""
        copies: dict[str, list[Copy]] = {name: [] for name in self._sources.values()}
        for name, target in targets.items():
            start, end = _span(target)
            for source, part, target_part in self._written.get(storage_of(target), ()):
                low, high = _span(target_part)
                if start <= low and high <= end:
                    copy = Copy(
                        start=int(part.storage_offset()),
                        shape=tuple(part.shape),
                        stride=part.stride(),
                        parameter=name,
                        offset=low - start,
                        server_stride=target_part.stride(),
                    )
                    copies[source].append(copy)
        return copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it copies a source or writes into a target."""
        changed = [tensor for tensor in _changed(func, args, kwargs or {}) if tensor.numel()]
        for tensor in changed:
            if name := self._sources.get(storage_of(tensor)):
                raise UnsupportedModelError(f"{name}: vLLM modifies it while loading it ({func})", hint=OTHER_MODES)
            self._forget(tensor)
        is_copy = bool(changed) and func is _aten.copy_.default
        source = self._sources.get(storage_of(args[1])) if is_copy else None
        if source is not None and args[0].shape == args[1].shape and is_exact(args[1].dtype, args[0].dtype):
            self._written.setdefault(storage_of(args[0]), []).append(_Written(source, args[1], args[0]))
            return args[0]
        if any(storage_of(tensor) in self._targets for tensor in changed):
            if is_copy:
                args[1].expand(args[0].shape)  # raises the error that the copy would raise
            return changed[0]
        converts = func is _aten._to_copy.default and is_exact(args[0].dtype, (kwargs or {}).get("dtype"))
        if converts and storage_of(args[0]) in self._sources:
            return _aten.alias.default(args[0])  # the next copy has the target's dtype
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _forget(self, tensor: Tensor) -> None:
        """Drop every copy that a write into `tensor` may have overwritten."""
        low, high = _span(tensor)
        before = self._written.get(storage_of(tensor), [])
        spans = [_span(written.target) for written in before]
        before[:] = [w for w, (start, end) in zip(before, spans, strict=True) if end <= low or high <= start]


def is_exact(source: torch.dtype, target: torch.dtype | None) -> bool:
    """Return whether a copy preserves every value: same dtype, or float32, in which vLLM keeps some of its weights."""
    return target in (source, torch.float32)


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage among all live storages."""
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the range of storage elements that `tensor` spans, as (first, last + 1)."""
    low = int(tensor.storage_offset())
    return low, low + 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that `func` writes into according to its schema."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors = value if isinstance(value, list | tuple) else [value]
            yield from (tensor for tensor in tensors if tensor is not None)
