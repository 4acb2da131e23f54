"""Copies join into one view or are refused; correct layouts pass, and any single mistake in one is reported."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import View
from bridge.weights.attach import _view
from bridge.weights.layout import Copy, Shape, check_coverage, check_parts, contiguous_stride, cut_of, join
from bridge.weights.rank_parts import Cut
from bridge_patches import loading
from tests.unit.patches.test_loading import skeleton
from tests.unit.weights import random_server
from tests.unit.weights.random_server import Server

NUM_LAYOUTS = 250


def rows(parameter: str, shape: Shape, start: int, count: int) -> View:
    """Return the view of `count` rows from row `start` of a contiguous parameter of `shape`."""
    row = math.prod(shape[1:])
    return View(parameter=parameter, offset=start * row, shape=(count, *shape[1:]), stride=contiguous_stride(shape))


@dataclass(frozen=True)
class Layout:
    model: dict[str, Shape] = field(default_factory=dict)
    server: dict[str, Shape] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        check_coverage(self.model, self.server, self.views, self.padding)

    def refused(self) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            self.check()
        assert "\n" not in caught.value.message
        return caught.value.message


def random_layout(random_: random.Random) -> Layout:
    """Fuse, pad and tie as servers do: parts are runs of rows, padding is at the end, tied weights are stored once."""
    layout = Layout()
    for index in range(random_.randint(1, 4)):
        rest = tuple(random_.randint(1, 5) for _ in range(random_.randint(0, 2)))
        counts = [random_.randint(1, 6) for _ in range(random_.randint(1, 4))]
        spare = random_.choice([0, 0, random_.randint(1, 5)])
        whole, start = (sum(counts) + spare, *rest), 0
        layout.server[f"v{index}"] = whole
        for part, count in enumerate(counts):
            name = f"h{index}.{part}"
            layout.model[name] = (count, *rest)
            layout.views[name] = rows(f"v{index}", whole, start, count)
            start += count
        if spare:
            layout.padding[f"v{index}"] = spare * math.prod(rest)
    return layout


def mutations(layout: Layout, random_: random.Random) -> dict[str, Layout]:
    """Return every kind of single mistake, each at a random position."""
    name = random_.choice(sorted(layout.views))
    view = layout.views[name]
    server = view.parameter
    by = random_.choice([-1, 1]) * random_.randint(1, 3)
    offset = view.offset + by if view.offset + by >= 0 else view.offset + 1
    longer = (view.shape[0] + 1, *view.shape[1:])

    def with_view(**changes: object) -> Layout:
        return replace(layout, views={**layout.views, name: view.model_copy(update=changes)})

    def without(mapping: dict[str, View]) -> dict[str, View]:
        return {key: value for key, value in mapping.items() if key != name}

    cases = {
        "offset shifted": with_view(offset=offset),
        "view longer": with_view(shape=longer, stride=contiguous_stride(longer)),
        "both longer": replace(with_view(shape=longer), model={**layout.model, name: longer}),
        "view dropped": replace(layout, views=without(layout.views)),
        "dropped on both sides": replace(
            layout,
            views=without(layout.views),
            model={key: shape for key, shape in layout.model.items() if key != name},
        ),
        "view of nobody": replace(layout, views={**layout.views, "stranger": view}),
        "duplicated on both sides": replace(
            layout, views={**layout.views, "twin": view}, model={**layout.model, "twin": view.shape}
        ),
        "lies in nothing": with_view(parameter="v99"),
        "stride doubled": with_view(stride=tuple(2 * step for step in view.stride)),
        "padding larger": replace(layout, padding={**layout.padding, server: layout.padding.get(server, 0) + 1}),
        "padding negative": replace(layout, padding={**layout.padding, server: -1}),
        "padding of nobody": replace(layout, padding={**layout.padding, "v99": 1}),
        "server larger": replace(
            layout, server={**layout.server, server: (layout.server[server][0] + 1, *layout.server[server][1:])}
        ),
        "server parameter without owner": replace(layout, server={**layout.server, "v99": (3,)}),
        "server parameter gone": replace(
            layout, server={key: shape for key, shape in layout.server.items() if key != server}
        ),
    }
    if layout.padding.get(server):
        cases["padding dropped"] = replace(layout, padding={})
    if len(layout.views) > 1:
        other = random_.choice(sorted(without(layout.views)))
        if layout.views[other].shape != view.shape:
            swapped = {**layout.views, name: layout.views[other], other: view}
            cases["two views swapped"] = replace(layout, views=swapped)
    return cases


def test_correct_layouts_pass_and_single_mistakes_are_refused() -> None:
    random_, num_cases = random.Random(0), 0
    for _ in range(NUM_LAYOUTS):
        layout = random_layout(random_)
        layout.check()
        for kind, broken in mutations(layout, random_).items():
            assert broken.refused(), kind
            num_cases += 1
    assert num_cases > 2000


def test_padding_that_overlaps_a_neighbor_is_refused() -> None:
    """A negative padding would let a view extend past its parameter into other memory."""
    layout = Layout({"embed": (4, 2)}, {"embed": (3, 2)}, {"embed": rows("embed", (4, 2), 0, 4)}, {"embed": -2})
    assert "embed" in layout.refused()


def test_nested_view_is_reported_as_an_overlap() -> None:
    layout = Layout(
        {"outer": (10,), "inner": (2,)},
        {"w": (10,)},
        {"outer": rows("w", (10,), 0, 10), "inner": rows("w", (10,), 4, 2)},
    )
    assert "overlap" in layout.refused()


def test_gaps_in_a_server_tensor_are_reported_anywhere() -> None:
    model: dict[str, Shape] = {"a": (2,), "b": (2,)}
    for starts, words in {(1, 3): "its start and a", (0, 3): "a and b", (0, 2): "b and its end"}.items():
        views = {name: rows("w", (6,), start, 2) for name, start in zip("ab", starts, strict=True)}
        message = Layout(model, {"w": (6,)}, views).refused()
        assert "gap" in message
        assert words in message


def test_first_three_faults_are_named_and_others_counted() -> None:
    model: dict[str, Shape] = dict.fromkeys("abcde", (1,))
    assert "and 2 more" in Layout(model).refused()


def test_contiguous_strides_match_torch() -> None:
    assert contiguous_stride((12, 5, 2)) == (10, 2, 1)
    assert contiguous_stride(()) == ()
    assert contiguous_stride((7,)) == (1,)


def part(of: Tensor, into: Tensor, parameter: str = "w") -> Copy:
    return Copy(
        start=int(of.storage_offset()), shape=tuple(of.shape), stride=of.stride(), parameter=parameter,
        offset=int(into.storage_offset()), server_stride=into.stride(),
    )  # fmt: skip


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_full_parameter_is_one_view() -> None:
    assert join("p", (4, 6), [part(meta(4, 6), meta(10, 6)[3:7])]) == View(
        parameter="w", offset=18, shape=(4, 6), stride=(6, 1)
    )


def test_consecutive_parts_join_into_one_view() -> None:
    own, whole = meta(9, 6), meta(9, 6)
    parts = [part(own[rows], whole[rows]) for rows in (slice(4, 9), slice(0, 3), slice(3, 4))]
    assert join("p", (9, 6), parts) == View(parameter="w", offset=0, shape=(9, 6), stride=(6, 1))


def test_stacked_experts_join_into_one_view() -> None:
    own, stacked = meta(5, 8, 6), meta(5, 8, 6)
    parts = [part(own[e, half], stacked[e, half]) for e in range(5) for half in (slice(0, 4), slice(4, 8))]
    assert join("p", (5, 8, 6), parts) == View(parameter="w", offset=0, shape=(5, 8, 6), stride=(48, 6, 1))


def test_block_of_one_rank_is_a_view_with_its_own_shape() -> None:
    assert join("p", (8, 6), [part(meta(8, 6)[2:4], meta(2, 6))]).shape == (2, 6)
    assert join("p", (8, 6), [part(meta(8, 6)[:, 3:], meta(8, 3))]).shape == (8, 3)


def test_transpose_is_a_view_with_transposed_strides() -> None:
    assert join("p", (4, 6), [part(meta(4, 6).t(), meta(6, 4))]).stride == (1, 4)


def test_parameter_of_one_element_is_a_view() -> None:
    assert join("p", (1,), [part(meta(1), meta(3)[2:])]) == View(parameter="w", offset=2, shape=(1,), stride=(1,))
    assert join("p", (), [part(meta(), meta())]) == View(parameter="w", offset=0, shape=(), stride=())


OWN, WHOLE = meta(6, 4), meta(12, 4)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "none of its parameters"),
        ([part(OWN, WHOLE[:6]), part(OWN, WHOLE[:6], "other")], "other and w"),
        ([part(OWN[:3], WHOLE[:3]), part(OWN[4:], WHOLE[4:6])], "no single stride"),
        ([part(OWN[:3, :2], WHOLE[:3, :2]), part(OWN[3:, 2:], WHOLE[3:6, 2:])], "only some of its elements"),
        ([part(OWN[:3], WHOLE[3:6]), part(OWN[3:], WHOLE[:3])], "no single stride"),
        ([part(OWN[:3], WHOLE[:3]), part(OWN[3:], WHOLE[4:7])], "no single stride"),
        ([part(OWN[0::2], WHOLE[:3]), part(OWN[1::2], WHOLE[3:6])], "is not a block"),
        ([part(OWN.view(-1), WHOLE.view(-1)[:24])], "is not a block"),
        ([part(OWN[:1].expand(6, 4), WHOLE[:6])], "is not a block"),
        ([part(OWN[:3], WHOLE[:3]), part(OWN[3:, :2], WHOLE[3:6, :2]), part(OWN[3:, 2:], WHOLE[6:9, :2])], "stride"),
    ],
)
def test_parts_without_a_common_view_are_refused(parts: list[Copy], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        join("p", (6, 4), parts)
    assert caught.value.message.startswith("p: ")


def test_skipped_rows_split_a_part_into_runs() -> None:
    own, served = meta(12, 6), meta(6, 6)
    parts = [part(own[2:4], served[:2]), part(own[8:12], served[2:])]
    view = join("p", (12, 6), parts)
    assert (view.shape, view.stride, view.offset) == ((6, 6), (6, 1), 0)
    assert cut_of(view) == Cut((12, 6), (((2, 2), (8, 4)), ((0, 6),)))
    assert cut_of(join("p", (4, 6), [part(meta(4, 6), meta(4, 6))])) == Cut.whole((4, 6))


NUM_CUTS = 300


def cut_into(random_: random.Random, num_parts: int) -> tuple[Shape, list[Cut]]:
    """Split a parameter as vLLM does: fused blocks, each split evenly, shared by adjacent ranks, or replicated."""
    rest = tuple(random_.randint(1, 4) for _ in range(random_.randint(0, 2)))
    axis = random_.randint(0, len(rest))
    runs_of_parts: list[list[tuple[int, int]]] = [[] for _ in range(num_parts)]
    end = 0
    for _ in range(random_.randint(1, 3)):
        sharing = random_.choice([1, 1, num_parts]) if axis == 0 else 1
        length = random_.randint(1, 3)
        for number, runs in enumerate(runs_of_parts):
            runs.append((end + length * (number // sharing), length))
        end += length * -(-num_parts // sharing)
    shape = (*rest[:axis], end, *rest[axis:])
    whole = Cut.whole(shape).runs
    return shape, [Cut(shape, (*whole[:axis], tuple(runs), *whole[axis + 1 :])) for runs in runs_of_parts]


def views_of(cuts: list[Cut]) -> list[dict[str, View]]:
    """Return the view that each rank's copies join into."""
    views = []
    for cut in cuts:
        own, served, copies = meta(*cut.shape), meta(*cut.part_shape), []
        axis = next((axis for axis, runs in enumerate(cut.runs) if len(runs) > 1), cut.axis or 0)
        offset = 0
        for start, length in cut.runs[axis]:
            copies.append(part(own.narrow(axis, start, length), served.narrow(axis, offset, length)))
            offset += length
        views.append({"p": join("p", cut.shape, copies)})
    return views


def test_parts_reassemble_into_their_parameter() -> None:
    random_ = random.Random(0)
    for _ in range(NUM_CUTS):
        shape, cuts = cut_into(random_, random_.choice([2, 3, 4]))
        views = views_of(cuts)
        check_parts(views)
        whole = torch.arange(math.prod(shape)).view(shape)
        rebuilt = torch.full(shape, -1)
        for view in views:
            cut = cut_of(view["p"])
            check_coverage({"p": shape}, {"w": cut.part_shape}, view, {})
            cut.put(rebuilt, cut.of(whole))
        assert torch.equal(rebuilt, whole)


def whole_and(*runs: tuple[tuple[int, int], ...], columns: tuple[tuple[int, int], ...] = ((0, 4),)) -> list[Cut]:
    return [Cut((8, 4), (rows, columns)) for rows in runs]


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (whole_and(((0, 4),), ((5, 3),)), "holds index 4 of axis 0"),
        (whole_and(((0, 4),), ((4, 3),)), "holds index 7 of axis 0"),
        (whole_and(((0, 4),), ((4, 4),), columns=((0, 2),)), "several axes"),
        (
            [*whole_and(((0, 8),), columns=((0, 2),)), *whole_and(((0, 8),), columns=((0, 2),))],
            "same indices of axis 1",
        ),
        ([Cut.whole((8, 4)), Cut.whole((4, 8))], "full shape differs"),
    ],
)
def test_parts_with_missing_elements_are_refused(cuts: list[Cut], words: str) -> None:
    views = [
        {"p": View(parameter="w", offset=0, shape=c.part_shape, stride=(1,), whole=c.shape, runs=c.runs)} for c in cuts
    ]
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        check_parts(views)
    assert ": p: " in caught.value.message


def test_parameter_on_only_some_ranks_is_refused() -> None:
    view = View(parameter="w", offset=0, shape=(4,), stride=(1,))
    with pytest.raises(UnsupportedModelError, match="p: only on some of vLLM's ranks"):
        check_parts([{"p": view}, {}])


NUM_CASES, NUM_TESTS = 10_000, 8


def values(server: Server, first: int) -> dict[str, Tensor]:
    """Give every element of the model a distinct value."""
    made = {}
    for name, shape in server.shapes.items():
        made[name] = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        first += made[name].numel()
    return made


def laid_out(server: Server) -> dict[str, View] | None:
    """Return the layout that server and trainer derive and check; None if they refuse it."""
    model = server.model()
    try:
        views = loading.views(model, skeleton(server.shapes, torch.float32))
        check_coverage(server.shapes, server.held, views, server.padding)
        check_parts([views])
    except UnsupportedModelError:
        return None
    assert all((parameter == -1).all() for parameter in model.parameters())
    return views


def check(server: Server, views: dict[str, View]) -> None:
    """Check that writing through the trainer's views stores exactly the bytes that the server would have loaded."""
    served, expected = server.model(), server.model()
    served.load_weights(values(server, 1000).items())
    held = dict(served.named_parameters())
    mine = {name: _view(held[view.parameter], view) for name, view in views.items()}
    for name, weight in values(server, 1000).items():
        assert torch.equal(mine[name], weight), name
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    for name, weight in values(server, 5000).items():
        mine[name].copy_(weight)
    expected.load_weights(values(server, 5000).items())
    for name, parameter in expected.named_parameters():
        own = parameter.numel() - server.padding.get(name, 0)
        assert torch.equal(held[name].view(-1)[:own], parameter.view(-1)[:own]), name
        assert torch.equal(held[name].view(-1)[own:], before[name].view(-1)[own:]), name


@pytest.mark.parametrize("part", range(NUM_TESTS))
def test_random_layouts_are_correct_or_refused(part: int) -> None:
    num_accepted = num_refused = 0
    for case in range(part, NUM_CASES, NUM_TESTS):
        server = random_server.make(random.Random(case))
        views = laid_out(server)
        if views is None:
            assert not server.is_plain, case
            num_refused += 1
        else:
            check(server, views)
            num_accepted += 1
    assert num_accepted > NUM_CASES / NUM_TESTS / 3
    assert num_refused > NUM_CASES / NUM_TESTS / 5


@pytest.mark.parametrize("odd", random_server.ODD, ids=lambda odd: odd.__name__)
def test_each_unsupported_loader_behavior_is_refused(odd: random_server.Load) -> None:
    load = ("v", (slice(0, 4),), (), odd)
    assert laid_out(Server(shapes={"h": (4, 4)}, held={"v": (4, 4)}, loads={"h": [load]})) is None
