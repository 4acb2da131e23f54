"""Gradients of many micro-batches on a GPU are summed in float32, and the compiled update uses the float32 sums."""

import copy

import torch

from tests.unit.run.test_learner import base, distance, gradient, made_by, naive_gradient, prepared, weights


def test_many_micro_batches_are_as_exact_as_one() -> None:
    groups = made_by(base(seed=8))
    exact = base().bfloat16().double()
    expected = naive_gradient(copy.deepcopy(exact), groups, exact)
    errors = []
    for tokens in (None, 1):
        model = base().bfloat16().cuda()
        learner = prepared(model, groups * 16, batch_size=256, micro_batch_tokens=tokens)
        gradients = gradient(model)
        assert {tensor.dtype for tensor in gradients.values()} == {torch.float32 if tokens else torch.bfloat16}
        errors.append(distance({name: tensor.cpu() for name, tensor in gradients.items()}, expected))
        before = weights(model)
        learner.write()
        assert learner.learnt()["updates"] == 1
        assert gradient(model) == {}
        assert all(tensor.isfinite().all() for tensor in weights(model).values())
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
    one, many = errors
    assert many < 1.2 * one < 0.03, errors
