"""bf16 products with float32 results: the same numbers as bf16 gives after one rounding, forward and backward."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from bridge.passes import layers
from tests.models import tiny


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_and_gradients_are_rounded_once(shape: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(16, 5, bias=has_bias, dtype=torch.bfloat16)
    rows = random(*shape).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (rows, *layer.parameters())]
    layers.widen(layer)
    out = layer(rows)
    expected = functional.linear(*exact)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.detach().float().bfloat16())
    gradient = random(*expected.shape)
    out.backward(gradient)
    expected.backward(gradient.double())
    for found, right in zip((rows, *layer.parameters()), exact, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        assert torch.equal(found.grad, right.grad.float().bfloat16())


def test_what_is_frozen_gets_no_gradient_and_passes_one_on() -> None:
    layer = nn.Linear(8, 4, dtype=torch.bfloat16).requires_grad_(False)
    layers.widen(layer)
    rows = random(3, 8).requires_grad_()
    layer(rows).sum().backward()
    assert rows.grad is not None
    assert [parameter.grad for parameter in layer.parameters()] == [None, None]


def test_float32_is_multiplied_as_it_is() -> None:
    layer = nn.Linear(8, 4)
    rows = random(3, 8, dtype=torch.float32)
    before = layer(rows)
    layers.widen(layer)
    assert torch.equal(layer(rows), before)


def test_a_model_keeps_its_parameters_and_what_it_computes() -> None:
    model = AutoModelForCausalLM.from_config(tiny.llama(), dtype=torch.bfloat16).eval()
    tokens = torch.arange(3, 19).unsqueeze(0)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        before = model(input_ids=tokens).logits.float()
        layers.widen(model)
        after = model(input_ids=tokens).logits.float()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert (after - before).abs().max() < before.abs().max() / 64


def test_only_bf16_is_widened_where_nothing_is_learnt() -> None:
    rows, weight, bias = random(3, 8), random(4, 8), random(4)
    expected = functional.linear(rows.double(), weight.double(), bias.double()).float().bfloat16()
    assert torch.equal(layers.wide_linear(rows, weight, bias), expected)
    wide = [tensor.float() for tensor in (rows, weight, bias)]
    assert torch.equal(layers.wide_linear(*wide), functional.linear(*wide))
