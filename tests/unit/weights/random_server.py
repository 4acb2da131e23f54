"""A random server that fuses, stacks, pads and ties weights, and whose loader may alter them in unsupported ways."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
Load = Callable[[Tensor, Tensor], None]
"""Loads a weight into its position in the server's parameter."""


def _plain(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded)


def _by_slices(parameter: Tensor, loaded: Tensor) -> None:
    for row in reversed(range(len(loaded))):
        parameter.data[row : row + 1] = loaded.narrow(0, row, 1)


def _duplicated(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded.clone().to(parameter.dtype).detach())


def _twice(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded)
    parameter.copy_(loaded)


def _cleared_first(parameter: Tensor, loaded: Tensor) -> None:
    parameter.zero_()
    parameter.copy_(loaded)


def _by_halves(parameter: Tensor, loaded: Tensor) -> None:
    for there, here in zip(parameter.chunk(2, dim=-1), loaded.chunk(2, dim=-1), strict=True):
        there.copy_(here.contiguous())


def _doubled(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded * 2)


def _shifted_afterwards(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded)
    parameter.add_(1)


def _one_row_shifted(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded)
    parameter[-1:].add_(1)


def _upside_down(parameter: Tensor, loaded: Tensor) -> None:
    for row in range(len(loaded)):
        parameter[len(loaded) - 1 - row].copy_(loaded[row])


def _halves_swapped(parameter: Tensor, loaded: Tensor) -> None:
    half = len(loaded) // 2
    parameter[: len(loaded) - half].copy_(loaded[half:])
    parameter[len(loaded) - half :].copy_(loaded[:half])


def _interleaved(parameter: Tensor, loaded: Tensor) -> None:
    order = [*range(0, len(loaded), 2), *range(1, len(loaded), 2)]
    parameter.copy_(loaded[order])


def _transposed(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded.t() if loaded.dim() == 2 and loaded.shape[0] == loaded.shape[1] else loaded)


def _spread(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded[:1])


def _in_part(parameter: Tensor, loaded: Tensor) -> None:
    parameter[1:].copy_(loaded[1:])


def _by_value(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded)
    if loaded.sum().item() > 0:
        parameter[:1].mul_(2)


def _rounded(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded.to(torch.bfloat16).to(parameter.dtype))


def _changed_first(parameter: Tensor, loaded: Tensor) -> None:
    parameter.copy_(loaded.clone().add_(1))


def _left_out(parameter: Tensor, loaded: Tensor) -> None:
    """Keep the old value."""


GOOD: tuple[Load, ...] = (_plain, _by_slices, _duplicated, _twice, _cleared_first)
ODD: tuple[Load, ...] = (
    _by_halves, _doubled, _shifted_afterwards, _one_row_shifted, _upside_down, _halves_swapped, _interleaved,
    _transposed, _spread, _in_part, _by_value, _rounded, _changed_first, _left_out,
)  # fmt: skip


@dataclass
class Server:
    """A random server: shapes, padding and loading."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    """The model's parameters."""
    held: dict[str, Shape] = field(default_factory=dict)
    """The server's parameters."""
    padding: dict[str, int] = field(default_factory=dict)
    """Declared number of padding elements at the end of the server's parameters."""
    loads: dict[str, list[tuple[str, tuple[slice, ...], tuple[slice, ...], Load]]] = field(default_factory=dict)
    """Model's parameter -> its loads: (server's parameter, slice to write, slice to read, how to load)."""
    is_plain: bool = True
    """Whether the server has no oddities, so that it must be accepted."""

    def model(self) -> "Model":
        """Return a new model whose weights are not loaded yet."""
        return Model(self)


class Model(nn.Module):
    """The server's model."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        for name, shape in server.held.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, -1.0), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load each weight in the way chosen for it."""
        for name, loaded in weights:
            for parameter, into, of, load in self._server.loads[name]:
                load(self.get_parameter(parameter).data[into], loaded[of])


def make(random_: random.Random) -> Server:
    """Create a server. Most servers are correct; the others have one or two unsupported behaviors."""
    server = Server()
    for index in range(random_.randint(1, 3)):
        (_stack if random_.random() < 0.3 else _fuse)(server, f"v{index}", random_)
    for _ in range(random_.choice([0, 0, 1, 2])):
        random_.choice([_odd_load, _odd_load, _another_place, _overwritten, _odd_padding, _odd_size])(server, random_)
        server.is_plain = False
    return server


def _fuse(server: Server, name: str, random_: random.Random) -> None:
    """Stack several parameters by rows, sometimes with padding at the end."""
    rest = tuple(random_.randint(1, 4) for _ in range(random_.randint(0, 2)))
    start = 0
    for part in range(random_.randint(1, 3)):
        count = random_.randint(1, 5)
        own = f"h{name}x{part}"
        server.shapes[own] = (count, *rest)
        server.loads[own] = [(name, (slice(start, start + count),), (), random_.choice(GOOD))]
        start += count
    spare = random_.choice([0, 0, 3])
    server.held[name] = (start + spare, *rest)
    if spare:
        server.padding[name] = spare * torch.Size(rest).numel()


def _stack(server: Server, name: str, random_: random.Random) -> None:
    """Load one parameter expert by expert, each in two halves."""
    experts, half, inner = random_.randint(1, 3), random_.randint(1, 3), random_.randint(1, 3)
    own = f"h{name}"
    server.shapes[own] = server.held[name] = (experts, 2 * half, inner)
    cells = [
        (slice(expert, expert + 1), slice(start, start + half)) for expert in range(experts) for start in (0, half)
    ]
    random_.shuffle(cells)
    server.loads[own] = [(name, cell, cell, random_.choice(GOOD)) for cell in cells]


def _odd_load(server: Server, random_: random.Random) -> None:
    loads = server.loads[random_.choice(sorted(server.loads))]
    index = random_.randrange(len(loads))
    loads[index] = (*loads[index][:3], random_.choice(ODD))


def _another_place(server: Server, random_: random.Random) -> None:
    """Load a part at a different position, additionally or instead."""
    loads = server.loads[random_.choice(sorted(server.loads))]
    index = random_.randrange(len(loads))
    parameter, into, of, load = loads[index]
    start = max(0, (into[0].start or 0) + random_.choice([-1, 1]))
    moved = (parameter, (slice(start, start + into[0].stop - into[0].start), *into[1:]), of, load)
    loads[index : index + random_.randint(0, 1)] = [moved]


def _overwritten(server: Server, random_: random.Random) -> None:
    """Load a part over another parameter's elements."""
    name, other = (random_.choice(sorted(server.loads)) for _ in range(2))
    parameter, into, _, load = random_.choice(server.loads[other])
    server.loads[name].append((parameter, into, (), load))


def _odd_padding(server: Server, random_: random.Random) -> None:
    name = random_.choice(sorted(server.held))
    server.padding[name] = max(0, server.padding.get(name, 0) + random_.choice([-2, -1, 1, 2]))


def _odd_size(server: Server, random_: random.Random) -> None:
    name = random_.choice(sorted(server.held))
    rows, *rest = server.held[name]
    server.held[name] = (max(1, rows + random_.choice([-1, 1])), *rest)
