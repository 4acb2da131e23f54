"""Watch a loader copy a model's parameters into a server's, without letting it: what would have gone where.

The model's parameters may lie on the meta device. The loader cuts views of them and of the server's parameters, and
copies one into the other; storage, offset and strides of both say which elements those are. What is computed on the
way is no view any more: a server's parameter made of it is left without an owner, which `layout.py` refuses by name.

Not covered: loaders that need a value of a weight (they raise), parameters that are replaced rather than copied into.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.errors import UnsupportedModelError
from bridge.weights.cuts import Copy
from bridge.weights.layout import OTHER_MODES

_aten = torch.ops.aten
_DUPLICATES = (_aten.clone.default, _aten._to_copy.default)


class ViewsOnly(TorchDispatchMode):
    """Give a view wherever a duplicate of one of `tensors` is asked for: code that only cuts them makes no copy."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = tensors  # or the address of a storage could be given away
        self._storages = {_storage(tensor) for tensor in self._kept}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, or alias its argument."""
        kwargs = kwargs or {}
        if func in _DUPLICATES and kwargs.get("dtype") in {None, args[0].dtype} and self._is_ours(args[0]):
            return _aten.alias.default(args[0])
        return func(*args, **kwargs)

    def _is_ours(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._storages


@dataclass(frozen=True)
class _Written:
    """A copy of a part of a source, and where it went."""

    source: str
    part: Tensor
    target: Tensor

    def span(self) -> tuple[int, int]:
        return _span(self.target)


class CopyRecorder(ViewsOnly):
    """Record what is copied out of `sources` instead of doing it, and keep `targets` as they are; no source changes.

    Sources have a storage each; targets may lie in one.
    """

    def __init__(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        super().__init__([*sources.values()])
        self._sources = {_storage(tensor): name for name, tensor in sources.items()}
        assert len(self._sources) == len(sources), "two sources in one storage"
        self._targets = {_storage(tensor): tensor for tensor in targets.values()}
        self._written: dict[int, list[_Written]] = {}

    def copies(self, targets: Mapping[str, Tensor]) -> dict[str, list[Copy]]:
        """Return each source's parts that lie in `targets` at the end: loaders may have made more than there were."""
        found: dict[str, list[Copy]] = {name: [] for name in self._sources.values()}
        for name, target in targets.items():
            start, end = _span(target)
            for written in self._written.get(_storage(target), ()):
                low, high = written.span()
                if start <= low and high <= end:
                    found[written.source].append(_copy(written, name, start))
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it copies a source or writes into a target.

        Raises:
            UnsupportedModelError: it writes into a source.
        """
        changed = [tensor for tensor in _changed(func, args, kwargs or {}) if tensor.numel()]
        for tensor in changed:
            if self._is_ours(tensor):
                name = self._sources[_storage(tensor)]
                raise UnsupportedModelError(f"{name}: vLLM changes it while it loads it ({func})", remedy=OTHER_MODES)
            self._forget(tensor)
        if changed and func is _aten.copy_.default and self._is_copy(*args[:2]):
            self._written.setdefault(_storage(args[0]), []).append(
                _Written(self._sources[_storage(args[1])], args[1], args[0])
            )
            return args[0]
        if any(_storage(tensor) in self._targets for tensor in changed):
            if func is _aten.copy_.default:
                args[1].expand(args[0].shape)  # a copy that fails has to fail
            return changed[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _is_copy(self, target: Tensor, source: Tensor) -> bool:
        return self._is_ours(source) and (target.shape, target.dtype) == (source.shape, source.dtype)

    def _forget(self, tensor: Tensor) -> None:
        """Drop every copy that a write into `tensor` may have overwritten."""
        low, high = _span(tensor)
        before = self._written.get(_storage(tensor), [])
        before[:] = [written for written in before if not (written.span()[0] < high and low < written.span()[1])]


def _copy(written: _Written, name: str, start: int) -> Copy:
    return Copy(
        start=int(written.part.storage_offset()),
        shape=tuple(written.part.shape),
        stride=written.part.stride(),
        parameter=name,
        offset=int(written.target.storage_offset()) - start,
        server_stride=written.target.stride(),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of its storage that `tensor` reaches, and the first behind all of them."""
    low = int(tensor.storage_offset())
    return low, low + 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that `func` writes into, by its schema."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in (value if isinstance(value, list | tuple) else [value]) if each is not None)
