"""Random layouts: whatever is accepted is right to the last byte, the rest is refused; nothing is silently wrong."""

import random

import pytest
import torch
from torch import Tensor

from bridge.errors import UnsupportedModelError
from bridge.server.manifest import View
from bridge.weights.attach import _view
from bridge.weights.layout import check_coverage, check_parts
from bridge_patches import loading
from tests.unit.test_loading import skeleton
from tests.unit.weights import random_server
from tests.unit.weights.random_server import Server

NUM_CASES, NUM_TESTS = 10_000, 8


def values(server: Server, first: int) -> dict[str, Tensor]:
    """Give every element of the model a distinct value."""
    made = {}
    for name, shape in server.shapes.items():
        made[name] = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        first += made[name].numel()
    return made


def laid_out(server: Server) -> dict[str, View] | None:
    """Return the layout as a server and a trainer find and check it; None if they refuse it."""
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
    """Check that writing through the trainer's views gives, byte for byte, what the server would have loaded."""
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
def test_what_is_accepted_is_right_and_the_rest_is_refused(part: int) -> None:
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
def test_each_oddity_alone_is_refused(odd: random_server.Load) -> None:
    load = ("v", (slice(0, 4),), (), odd)
    assert laid_out(Server(shapes={"h": (4, 4)}, held={"v": (4, 4)}, loads={"h": [load]})) is None
