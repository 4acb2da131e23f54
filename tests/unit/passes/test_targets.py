"""Targets other than the next token, one or several per row, compared with float64: values, gradients, memory, packing.

Not covered: one target, which is the next token (`test_logprobs.py`, `test_packing.py`).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bridge.passes import attention, slices
from bridge.passes import logprobs as blocks
from bridge.passes.cut_layers import VocabularyPart
from bridge.passes.logprobs import LogitTransform, token_logprobs
from bridge.passes.packing import Kept, MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import Ranks
from tests.unit.passes.test_attention import SIZES
from tests.unit.several_ranks import on_ranks

CPU = torch.device("cpu")
WORDS = 1000
"""Four blocks, the last one of which is smaller."""
PLAIN = LogitTransform()
LIMIT_S = 110.0


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 256 * 16, "cuda": 256 * 16})


def exact_logprobs(hidden: Tensor, head: Tensor, bias: Tensor, targets: Tensor, by: LogitTransform) -> Tensor:
    raw, cap = hidden @ head.T + bias, by.final_logit_softcapping
    logits = raw if cap is None else cap * torch.tanh(raw / cap)
    return (logits / by.temperature).log_softmax(-1).gather(1, targets)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("compiles", [False, True])
def test_several_targets_equal_a_float64_computation(cap: float | None, compiles: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(10, 16), torch.randn(WORDS, 16), torch.randn(WORDS)]
    ours, exact = [x.clone().requires_grad_() for x in leaves], [x.double().requires_grad_() for x in leaves]
    targets, weights = torch.randint(WORDS, (10, 5)), torch.randn(10, 5)
    targets[:, 1] = targets[:, 0]  # the same target twice
    targets[0] = torch.tensor([0, 255, 256, WORDS - 1, 511])
    weights[:, 2] = 0
    by = LogitTransform(temperature=0.7, final_logit_softcapping=cap)

    logprobs, entropies, _ = token_logprobs(ours[0], ours[1], ours[2], targets, by, compiles)
    expected = exact_logprobs(exact[0], exact[1], exact[2], targets, by)
    alone = [token_logprobs(leaves[0], leaves[1], leaves[2], column, by, False) for column in targets.T]
    assert logprobs.shape == (10, 5)
    assert torch.equal(entropies, alone[0][1])
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(logprobs, torch.stack([of_column for of_column, _, _ in alone], dim=1))
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_single_target_column_equals_one_target_bitwise() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 16, requires_grad=True), torch.randn(WORDS, 16, requires_grad=True)
    targets, weights = torch.randint(WORDS, (10,)), torch.randn(10)
    one, _, _ = token_logprobs(hidden, head, None, targets, PLAIN, False)
    column, _, _ = token_logprobs(hidden, head, None, targets.unsqueeze(1), PLAIN, False)
    assert torch.equal(one, column.squeeze(1))
    mine = torch.autograd.grad((one * weights).sum(), [hidden, head])
    theirs = torch.autograd.grad((column.squeeze(1) * weights).sum(), [hidden, head])
    assert all(map(torch.equal, mine, theirs))


def test_filtered_targets_equal_a_float64_computation() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(8, 16), torch.randn(WORDS, 16)
    logits = hidden.double() @ head.double().T
    ordered = logits.sort(dim=1, descending=True)
    kept = Kept(((ordered.values[:, 19] + ordered.values[:, 20]) / 2).float(), torch.full((8,), 20.0))
    targets = ordered.indices[:, [3, 0, 19]]
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logprobs, _, _ = token_logprobs(ours, head, None, targets, PLAIN, False, kept)
    all_logits = exact @ head.double().T
    expected = all_logits.masked_fill(logits < ordered.values[:, 19:20], -torch.inf).log_softmax(-1).gather(1, targets)
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-4, atol=1e-4)
    weights = torch.randn(8, 3)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_several_targets_need_no_more_products_or_memory() -> None:
    sizes, products = list[int](), list[int]()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            outputs = result if isinstance(result, tuple) else (result,)
            sizes.extend(x.numel() for x in outputs if torch.is_tensor(x))
            products[-1] += function is torch.ops.aten.mm.default
            return result

    hidden, head = torch.randn(100, 16, requires_grad=True), torch.randn(WORDS, 16, requires_grad=True)
    for targets in (torch.arange(100), torch.randint(WORDS, (100, 50))):
        products.append(0)
        with Watch():  # type: ignore[no-untyped-call]
            token_logprobs(hidden, head, None, targets, PLAIN, False)[0].sum().backward()
    assert products[0] == products[1] > 0
    assert max(sizes) == max(head.numel(), 100 * 256) < 100 * WORDS


def sample(prompt: tuple[int, ...], *token_ids: int, **changes: Any) -> Sample:
    numbers = tuple(map(float, range(len(token_ids))))
    known: dict[str, Any] = {"sampled_logprobs": numbers, "advantages": numbers, "weight": 1.0}
    return Sample(prompt_token_ids=prompt, token_ids=token_ids, **known | changes)


def pack(samples: list[Sample], max_tokens: int = 1000, *, share_prompts: bool = False) -> list[MicroBatch]:
    return packs(samples, max_tokens=max_tokens, device=CPU, share_prompts=share_prompts)


def test_target_replaces_the_next_token() -> None:
    (plain,) = pack([sample((6, 1), 7), sample((1, 2, 3), 4, 5)])
    (batch,) = pack([sample((6, 1), 7, targets=(9,)), sample((1, 2, 3), 4, 5)])
    assert batch.targets_N.tolist() == [4, 5, 9]
    assert batch.several is None
    assert torch.equal(batch.tokens_T, plain.tokens_T)


def test_rows_with_fewer_targets_are_padded() -> None:
    several = {"targets": ((9, 8), (7, 6)), "target_weights": ((0.5, 0.25), (1.0, -1.0))}
    (batch,) = pack([sample((6, 1), 7), sample((1, 2, 3), 4, 5, **several), sample((1,), 2, targets=((3, 4, 5),))])
    assert batch.several is not None
    assert batch.several.ids_NK.tolist() == [[9, 8, 9], [7, 6, 7], [7, 7, 7], [3, 4, 5]]
    assert batch.several.weights_NK.tolist() == [[0.5, 0.25, 0], [1, -1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch.targets_N.tolist() == [9, 7, 7, 3]


def test_all_packs_hold_several_targets_if_any_sample_does() -> None:
    batches = pack([sample((6, 1), 7), sample((1, 2, 3), 4, targets=((5, 6),))], max_tokens=4)
    shapes = [batch.several.ids_NK.shape for batch in batches if batch.several is not None]
    assert shapes == [(1, 2), (1, 1)]


def test_packing_targets_is_independent_of_sample_order() -> None:
    samples = [sample((1, 2), 3, 4, targets=((first, 9), (first, 8))) for first in (5, 6, 7)]
    orders = [samples, samples[::-1], [samples[1], samples[2], samples[0]]]
    of_orders = [[batch.several.ids_NK.tolist() for batch in pack(order) if batch.several] for order in orders]
    assert of_orders[0] == of_orders[1] == of_orders[2]


def model_of(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES)
    config.initializer_range = 0.2
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return model


def random_samples() -> list[Sample]:
    """Return samples whose targets are several, one, or the next tokens; two share a prompt."""
    chance = torch.Generator().manual_seed(1)

    def ids(*shape: int) -> Any:
        return torch.randint(3, 97, shape, generator=chance).tolist()

    weights = tuple(map(tuple, torch.randn(4, 3, generator=chance).tolist()))
    prompt = tuple(ids(6))
    return [
        sample(prompt, *ids(4), targets=tuple(map(tuple, ids(4, 3))), target_weights=weights),
        sample(prompt, *ids(7), targets=tuple(ids(7))),
        sample(tuple(ids(3)), *ids(5)),
        sample(tuple(ids(1)), *ids(2), targets=tuple(map(tuple, ids(2, 2))), sampled=(True, True)),
    ]


def with_prompt_rows() -> list[Sample]:
    """Return samples whose rows begin inside the prompt, which three of them share, one with another target."""
    chance = torch.Generator().manual_seed(2)
    prompt = 11, 12, 13, 14, 15

    def scored(prompt: tuple[int, ...], completion: list[int], num_rows: int, target: int | None = None) -> Sample:
        length = num_rows + len(completion)
        numbers = tuple(torch.randn(length, generator=chance).tolist())
        targets = [*prompt[len(prompt) - num_rows :], *completion]
        targets[0] = targets[0] if target is None else target
        return Sample(
            prompt_token_ids=prompt, token_ids=tuple(completion), sampled_logprobs=numbers, advantages=numbers,
            weight=1.0, num_prompt_rows=num_rows, targets=tuple(targets) if target is not None else (),
        )  # fmt: skip

    return [
        scored(prompt, [20, 21, 22], 4),
        scored(prompt, [23, 24], 4),
        scored(prompt, [25], 3, target=77),
        scored((31, 32, 33), [34], 2),
    ]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_prompt_rows_equal_those_of_each_sample_alone(share_prompts: bool) -> None:
    samples, exact, ours = with_prompt_rows(), model_of(torch.float64), model_of(torch.float32)
    attention.choose(ours, attention.NAME)
    (batch,) = pack(samples, share_prompts=share_prompts)
    assert (batch.distinct is not None) == share_prompts
    logprobs_N, entropies_N = PreparedModel(ours).logprobs(batch, 1.0)
    assert len(logprobs_N) == len(entropies_N) == len(batch.advantages_N) == sum(one.num_trained for one in samples)
    (logprobs_N * batch.advantages_N).sum().backward()
    sizes = [samples[index].num_trained for index in batch.indices]
    found = dict(zip(batch.indices, logprobs_N.detach().split(sizes), strict=True))
    for index, one in enumerate(samples):
        ids = [*one.prompt_token_ids, *one.token_ids]
        first = len(one.prompt_token_ids) - 1 - one.num_prompt_rows
        targets = torch.tensor(one.targets or ids[first + 1 :]).unsqueeze(1)
        rows = exact(input_ids=torch.tensor([ids])).logits[0, first:-1]
        expected_N = rows.log_softmax(-1).gather(1, targets).squeeze(1)
        (expected_N * torch.tensor(one.advantages)).sum().backward()
        torch.testing.assert_close(found[index], expected_N.float(), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(ours.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        difference = (mine.grad.double() - theirs.grad).norm()
        assert difference < 1e-4 * theirs.grad.norm().clamp(min=1e-2)


def test_rows_of_a_shared_prompt_are_computed_once() -> None:
    (batch,) = pack(with_prompt_rows(), share_prompts=True)
    assert batch.distinct is not None
    assert len(batch.rows_N) == 7 + 6 + 4 + 3
    num_repeated = 4 + 2  # all prompt rows of the second sample, and those of the third that have the same targets
    assert len(batch.distinct.chosen_M) == batch.num_computed == len(batch.rows_N) - num_repeated
    chosen_N = batch.distinct.chosen_M[batch.distinct.of_rows_N]
    assert torch.equal(batch.rows_N[chosen_N], batch.rows_N)
    assert torch.equal(batch.targets_N[chosen_N], batch.targets_N)


def with_several(one: Sample) -> Sample:
    """Return a sample with a second target per row, 50."""
    first: Any = one.targets or (*one.prompt_token_ids[-one.num_prompt_rows :], *one.token_ids)
    return replace(one, targets=tuple((token, 50) for token in first))


def test_rows_with_several_targets_are_computed_once() -> None:
    model = model_of(torch.float64)
    attention.choose(model, attention.NAME)
    samples = with_prompt_rows()
    whole, several = (pack(given, share_prompts=True)[0] for given in (samples, [*map(with_several, samples)]))
    assert several.num_computed == whole.num_computed < len(several.rows_N)
    of_rows_N, of_rows_NK = (PreparedModel(model).logprobs(batch, 1.0)[0] for batch in (whole, several))
    found, expected = (
        dict(zip(batch.indices, rows.split([samples[index].num_trained for index in batch.indices]), strict=True))
        for batch, rows in ((several, of_rows_NK[:, 0]), (whole, of_rows_N))
    )
    assert found.keys() == expected.keys()
    for index, rows in expected.items():
        torch.testing.assert_close(found[index], rows)


def test_rows_with_other_kept_words_are_computed_apart() -> None:
    one, other = (
        sample((1, 2, 3), 4, advantages=(0.0, 0.0), num_prompt_rows=1, sampled_logprobs=(0.0, 0.0), kept=kept)
        for kept in (((-1.5, 3), (0.5, 2)), ((-1.5, 3), (0.5, 1)))
    )
    (batch,) = pack([one, other], share_prompts=True)
    assert (len(batch.rows_N), batch.num_computed) == (4, 3)
    assert batch.kept is not None
    assert batch.distinct is not None
    for values_N in batch.kept:
        assert torch.equal(values_N[batch.distinct.chosen_M][batch.distinct.of_rows_N], values_N)


def exact_terms(model: PreTrainedModel, one: Sample) -> Tensor:
    """Return the log-probabilities of a sample's targets, computed only by transformers: [N, K]."""
    ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
    rows: Tensor = model(input_ids=ids).logits[0, len(one.prompt_token_ids) - 1 : -1]
    targets = torch.tensor(one.targets or one.token_ids).view(len(one.token_ids), -1)
    found: Tensor = rows.log_softmax(-1).gather(1, targets)
    return found


@pytest.mark.parametrize(("max_tokens", "share_prompts"), [(1000, False), (1000, True), (12, False)])
def test_packed_targets_equal_transformers_in_float64(max_tokens: int, share_prompts: bool) -> None:
    samples, exact, ours = random_samples(), model_of(torch.float64), model_of(torch.float32)
    attention.choose(ours, attention.NAME)
    prepared, found = PreparedModel(ours), dict[int, Tensor]()
    batches = packs(samples, max_tokens=max_tokens, device=CPU, share_prompts=share_prompts)
    assert len(batches) == (1 if max_tokens == 1000 else 3)
    for batch in batches:
        logprobs_NK, _ = prepared.logprobs(batch, 1.0)
        assert batch.several is not None
        (-(logprobs_NK * batch.several.weights_NK).sum()).backward()
        sizes = [samples[index].num_trained for index in batch.indices]
        found |= dict(zip(batch.indices, logprobs_NK.detach().split(sizes), strict=True))
    for index, one in enumerate(samples):
        expected_NK = exact_terms(exact, one)
        weights = torch.tensor(one.target_weights or [[1.0] * expected_NK.shape[1]])
        (-(expected_NK * weights).sum()).backward()
        actual_NK = found[index][:, : expected_NK.shape[1]]
        torch.testing.assert_close(actual_NK, expected_NK.float(), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(ours.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        difference = (mine.grad.double() - theirs.grad).norm()
        assert difference < 1e-4 * theirs.grad.norm().clamp(min=1e-2)


def of_slices(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Return log-probabilities, entropies and a gradient of sliced packs and of full ones."""
    model = model_of(torch.float32)
    attention.choose(model, attention.NAME)
    prepared = PreparedModel(model)
    prepared.slices = slices.cut(model, ranks.cp_group)
    (batch,) = pack([*random_samples(), *with_prompt_rows()], share_prompts=True)
    assert batch.num_computed < len(batch.rows_N)
    results = list[list[Tensor]]()
    for is_cut in (False, True):
        model.zero_grad()
        kept = prepared.slices
        prepared.slices = kept if is_cut else None
        logprobs_NK, entropies_N = prepared.logprobs(batch, 1.0)
        prepared.slices = kept
        assert batch.several is not None
        (logprobs_NK * batch.several.weights_NK).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        summed = [ranks.all_reduce(gradient.clone()) if is_cut else gradient.clone() for gradient in gradients]
        results.append([logprobs_NK.detach(), entropies_N, *summed])
    return list(zip(*results, strict=True))


def test_slices_with_several_targets_match_full_packs() -> None:
    for pairs in on_ranks(2, of_slices, cp_size=2, limit_s=LIMIT_S):
        for whole, cut in pairs:
            torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-4)


def with_a_cut_head(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Return the results for several targets with a part of the head, and with the full head."""
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 16), torch.randn(301, 16)
    targets, start = torch.randint(301, (20, 3)), 160 * ranks.rank
    assert dist.group.WORLD is not None
    words, own = VocabularyPart(start, dist.group.WORLD.group_name), slice(start, min(start + 160, 301))
    results = list[list[Tensor]]()
    for given, rows in ((words, own), (None, slice(None))):
        mine = hidden.clone().requires_grad_(), head[rows].clone().requires_grad_()
        logprobs_NK, entropies_N, _ = token_logprobs(*mine, None, targets, PLAIN, False, None, given)
        (logprobs_NK * torch.linspace(-1, 1, 60).view(20, 3)).sum().backward()
        results.append([logprobs_NK.detach(), entropies_N, *(leaf.grad for leaf in mine if leaf.grad is not None)])
    results[1][3] = results[1][3][own]
    return list(zip(*results, strict=True))


def test_targets_on_a_sharded_head_match_the_full_head() -> None:
    for pairs in on_ranks(2, with_a_cut_head, limit_s=LIMIT_S):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_target_weights_do_not_change_log_probs() -> None:
    samples = random_samples()
    zero = [replace(one, target_weights=()) if one.target_weights else one for one in samples]
    model = model_of(torch.float32)
    attention.choose(model, attention.NAME)
    both = [PreparedModel(model).logprobs(pack(given)[0], 1.0)[0] for given in (samples, zero)]
    assert torch.equal(*both)
