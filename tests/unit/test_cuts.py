"""Parts of a parameter add up to one view, or are refused."""

import pytest
import torch
from torch import Tensor

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import View
from bridge.weights.cuts import Copy, join


def part(of: Tensor, into: Tensor, parameter: str = "w") -> Copy:
    return Copy(
        start=int(of.storage_offset()), shape=tuple(of.shape), stride=of.stride(), parameter=parameter,
        offset=int(into.storage_offset()), server_stride=into.stride(),
    )  # fmt: skip


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_whole_parameter_is_a_view() -> None:
    assert join("p", (4, 6), [part(meta(4, 6), meta(10, 6)[3:7])]) == View(
        parameter="w", offset=18, shape=(4, 6), stride=(6, 1)
    )


def test_parts_that_follow_each_other_are_one_view() -> None:
    own, whole = meta(9, 6), meta(9, 6)
    parts = [part(own[rows], whole[rows]) for rows in (slice(4, 9), slice(0, 3), slice(3, 4))]
    assert join("p", (9, 6), parts) == View(parameter="w", offset=0, shape=(9, 6), stride=(6, 1))


def test_stacked_experts_are_one_view() -> None:
    own, stacked = meta(5, 8, 6), meta(5, 8, 6)
    parts = [part(own[e, half], stacked[e, half]) for e in range(5) for half in (slice(0, 4), slice(4, 8))]
    assert join("p", (5, 8, 6), parts) == View(parameter="w", offset=0, shape=(5, 8, 6), stride=(48, 6, 1))


def test_one_ranks_block_is_a_view_of_its_own_shape() -> None:
    assert join("p", (8, 6), [part(meta(8, 6)[2:4], meta(2, 6))]).shape == (2, 6)
    assert join("p", (8, 6), [part(meta(8, 6)[:, 3:], meta(8, 3))]).shape == (8, 3)


def test_a_transpose_is_a_view_with_the_strides_of_one() -> None:
    assert join("p", (4, 6), [part(meta(4, 6).t(), meta(6, 4))]).stride == (1, 4)


def test_a_parameter_of_one_element_is_a_view() -> None:
    assert join("p", (1,), [part(meta(1), meta(3)[2:])]) == View(parameter="w", offset=2, shape=(1,), stride=(1,))
    assert join("p", (), [part(meta(), meta())]) == View(parameter="w", offset=0, shape=(), stride=())


OWN, WHOLE = meta(6, 4), meta(12, 4)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "none of its parameters"),
        ([part(OWN, WHOLE[:6]), part(OWN, WHOLE[:6], "other")], "other and w"),
        ([part(OWN[:3], WHOLE[:3]), part(OWN[4:], WHOLE[4:6])], "leaves others out"),
        ([part(OWN[:3, :2], WHOLE[:3, :2]), part(OWN[3:, 2:], WHOLE[3:6, 2:])], "leaves others out"),
        ([part(OWN[:3], WHOLE[3:6]), part(OWN[3:], WHOLE[:3])], "no one stride"),
        ([part(OWN[:3], WHOLE[:3]), part(OWN[3:], WHOLE[4:7])], "no one stride"),
        ([part(OWN[0::2], WHOLE[:3]), part(OWN[1::2], WHOLE[3:6])], "no block"),
        ([part(OWN.view(-1), WHOLE.view(-1)[:24])], "no block"),
        ([part(OWN[:1].expand(6, 4), WHOLE[:6])], "no block"),
        ([part(OWN[:3], WHOLE[:3]), part(OWN[3:, :2], WHOLE[3:6, :2]), part(OWN[3:, 2:], WHOLE[6:9, :2])], "stride"),
    ],
)
def test_parts_that_are_no_one_view_are_refused(parts: list[Copy], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        join("p", (6, 4), parts)
    assert caught.value.message.startswith("p: ")
