"""Tensor parallelism: a model in parts has the log-probabilities and gradients of the full model, or is refused."""

import copy
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UnsupportedModelError
from bridge.passes import attention, cut_layers, layers, logprobs, parallel, recurrence
from bridge.passes.cut_layers import VocabularyPart
from bridge.passes.divergence import Divergence
from bridge.passes.logprobs import Comparison, LogitTransform, Prediction, token_logprobs
from bridge.passes.packing import Kept, MicroBatch, Sample, packs
from bridge.passes.parallel import Parallel, divide
from bridge.passes.parallel_proof import check_layers
from bridge.passes.preparation import prepare
from bridge.passes.prepared_model import PreparedModel
from bridge.ranks.world import Ranks
from bridge.weights import skeleton
from bridge.weights.model_folder import state
from bridge.weights.rank_parts import Cut, Parts, Shared, shared_elements
from tests import family_results
from tests.family_results import NUM_PARTS
from tests.models import vllm_cuts
from tests.models.families import FAMILIES, SHARING_KEYS
from tests.unit.several_ranks import on_ranks

TOLERANCE = 1e-4
"""Largest relative difference from the full model in float32."""
LIMIT_S = 300.0
Computed = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Log-probabilities, entropies and gradients."""
Proven = tuple[int, list[dict[str, dict[str, float] | str]]]
"""The number of parts, and for each part, by family, the differences by name, or the reason of a refusal."""


def made(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model that keeps sequences apart, as an attached one does."""
    model: PreTrainedModel = skeleton.auto_class(config).from_config(config, dtype=torch.float32)
    recurrence.keep_apart(model)  # as `prepare` does
    return model


def whole_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model in which all weights matter: biases are not 0, norms are not 1, and states do not fade quickly."""
    torch.manual_seed(0)
    model = made(config)
    for name, tensor in state(model).items():
        nn.init.normal_(tensor, -2.0 if name.endswith("A_log") else 1.0 if tensor.ndim == 1 else 0.0, 0.1)
    return model.eval()


def part_of(whole: PreTrainedModel, part: int, num_parts: int) -> tuple[PreTrainedModel, Parallel]:
    """Return one part of a model, with its own weights."""
    weights = state(whole)
    cuts = vllm_cuts.cuts(whole.config, {name: tensor.shape for name, tensor in weights.items()}, num_parts)
    model = made(whole.config)
    for name, tensor in state(model).items():
        tensor.data = cuts[part][name].of(weights[name].detach()).clone()
    assert dist.group.WORLD is not None
    return model.eval(), divide(model, cuts, dist.group.WORLD)


def batch() -> MicroBatch:
    chance = torch.Generator().manual_seed(1)
    samples = []
    for prompt, length in ((3, 9), (3, 4), (5, 17)):
        ids = torch.randint(300, (prompt + length,), generator=chance).tolist()
        zeros = (0.0,) * length
        samples.append(
            Sample(
                prompt_token_ids=tuple(ids[:prompt]), token_ids=tuple(ids[prompt:]), sampled_logprobs=zeros,
                advantages=zeros, weight=1.0,
            )
        )  # fmt: skip
    (packed,) = packs(samples, max_tokens=1000, device=torch.device("cpu"))
    return packed


def computed(model: PreTrainedModel, divided: Parallel | None = None) -> Computed:
    """Return what a full model computes, or a part."""
    attention.choose(model, attention.NAME)
    logprobs_T, entropies = PreparedModel(model, divided).logprobs(batch(), 0.9)
    (logprobs_T * torch.linspace(-1, 1, len(logprobs_T))).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logprobs_T.detach(), entropies, gradients


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-6))


def in_parts(whole: PreTrainedModel, expected: Computed, ranks: Ranks) -> dict[str, float]:
    model, divided = part_of(whole, ranks.rank, ranks.world_size)
    check_layers(model, divided)
    logprobs_T, entropies, gradients = computed(model, divided)
    expected_logprobs_T, expected_entropies, expected_gradients = expected
    divided.combine(gradients)
    cuts = divided.cuts[divided.part]
    assert gradients.keys() == expected_gradients.keys()
    return {
        "log-probabilities": difference(logprobs_T, expected_logprobs_T),
        "entropies": difference(entropies, expected_entropies),
        **{name: difference(gradients[name], cuts[name].of(gradient)) for name, gradient in expected_gradients.items()},
    }


def all_families(
    ranks: Ranks, full_models: dict[str, tuple[PreTrainedModel, Computed]]
) -> dict[str, dict[str, float] | str]:
    results: dict[str, dict[str, float] | str] = {}
    for family, (whole, expected) in full_models.items():
        try:
            results[family] = in_parts(whole, expected, ranks)
        except UnsupportedModelError as error:
            results[family] = error.message
    return results


def spoiled(ranks: Ranks, family: str, owner: Any, name: str, spoil: Any) -> tuple[str, float]:
    """Spoil a parameter; return the check's error, and how far log-probabilities are off."""
    setattr(owner, name, spoil)
    whole = whole_model(FAMILIES[family]())
    model, divided = part_of(whole, ranks.rank, ranks.world_size)
    with pytest.raises(UnsupportedModelError) as refusal:
        check_layers(model, divided)
    try:
        away = difference(computed(model, divided)[0], computed(whole)[0])
    except ArithmeticError:
        away = math.inf
    return refusal.value.message, away


@pytest.fixture(scope="module")
def full_models() -> dict[str, tuple[PreTrainedModel, Computed]]:
    """The full model of every family and what it computes, which the forked ranks inherit."""
    models = {family: whole_model(config()) for family, config in FAMILIES.items()}
    return {family: (model, computed(copy.deepcopy(model))) for family, model in models.items()}


@pytest.fixture(scope="module", params=NUM_PARTS)
def proven(request: pytest.FixtureRequest, full_models: dict[str, tuple[PreTrainedModel, Computed]]) -> Proven:
    """The results of every family, on each part."""
    num_parts: int = request.param
    return num_parts, on_ranks(num_parts, all_families, full_models, limit_s=LIMIT_S)


@pytest.mark.xdist_group("families in parts")  # `proven` computes all of them
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_family_matches_the_full_model(
    family: str, proven: Proven, pytestconfig: pytest.Config
) -> None:
    num_parts, parts = proven
    most = 0.0
    for differences in (by_family[family] for by_family in parts):
        if family in SHARING_KEYS:  # their layers depend on each other
            assert "cannot compute with a part of its weights" in str(differences)
            return
        assert not isinstance(differences, str), differences
        assert max(differences.values()) <= TOLERANCE, max(differences, key=lambda name: differences[name])
        most = max(most, *differences.values())
    if pytestconfig.getoption("--record-families"):
        family_results.record_parts(family, num_parts, float(f"{most:.1e}"))


@pytest.mark.parametrize(
    ("family", "owner", "name", "spoil", "outputs_are_right", "message"),
    [
        ("Qwen3", Parallel, "combine", lambda *_: None, True, r"the gradient of .*self_attn\.[kq]_"),
        ("Llama 3, 3.1", cut_layers, "_entered", lambda _, given: given, True, r"the gradient of "),
        ("Llama 2", cut_layers.RowLinear, "forward", nn.Linear.forward, False, r"the .* of model\.layers\.0\."),
        ("Phi-3", cut_layers, "count_own_heads", lambda *_: None, False, r"Phi3ForCausalLM cannot compute with a part"),
    ],
)
def test_proof_names_the_spoiled_parameter(
    family: str, owner: Any, name: str, spoil: Any, outputs_are_right: bool, message: str
) -> None:
    """Faults: shared gradients, gradients of a block's inputs, a bias added on every part, and counting all heads."""
    for refusal, away in on_ranks(2, spoiled, family, owner, name, spoil):
        assert (away < TOLERANCE) == outputs_are_right
        assert re.match(message, refusal), refusal


def unequal(ranks: Ranks, name: str) -> dict[str, tuple[int, int]]:
    model, divided = part_of(whole_model(FAMILIES["Qwen3"]()), ranks.rank, ranks.world_size)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += ranks.rank == 3
    return Parts(cuts=divided.cuts, tp_group=ranks.tp_group).differing(dict(model.named_parameters()))


@pytest.mark.parametrize(("name", "equal"), [("model.norm.weight", 0), ("model.layers.1.self_attn.k_proj.weight", 2)])
def test_all_parts_detect_different_shared_values(name: str, equal: int) -> None:
    """The fourth part shares KV heads only with the third, and norms with all."""
    assert on_ranks(4, unequal, name, tp_size=4) == [{name: (equal, 3)}] * 4


def refused(ranks: Ranks, name: str, axis: int) -> str:
    """Return the refusal of a model with one parameter that is (also) cut along a different axis."""
    whole = whole_model(FAMILIES["Qwen3-MoE"]())
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    cuts = vllm_cuts.cuts(whole.config, shapes, ranks.world_size)
    for part, held in enumerate(cuts):
        runs, size = list(held[name].runs), shapes[name][axis] // ranks.world_size
        runs[axis] = ((part * size, size),)
        held[name] = Cut(shapes[name], tuple(runs))
    assert dist.group.WORLD is not None
    with pytest.raises(UnsupportedModelError) as refusal:
        divide(whole, cuts, dist.group.WORLD)
    return refusal.value.message


@pytest.mark.parametrize(
    ("name", "axis", "message"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 1, "q_proj.weight is cut along 2 axes"),
        (
            "model.layers.1.mlp.gate.weight",
            0,
            "mlp is cut, and so is model.layers.1.mlp.experts inside it",
        ),
        ("model.norm.weight", 0, "model.norm is a column layer without its counterpart"),
    ],
)
def test_unsupported_cut_is_refused_by_name(name: str, axis: int, message: str) -> None:
    assert all(message in refusal for refusal in on_ranks(2, refused, name, axis))


def in_other_forms(ranks: Ranks, family: str) -> list[float]:
    """Return how far the gradients of recomputed, compiled and copied layers are from those of unmodified layers."""
    layers.COMPILER = "aot_eager"
    whole = whole_model(FAMILIES[family]())
    away = []
    expected = computed(*part_of(whole, ranks.rank, ranks.world_size))
    for form in (layers.call_again, partial(layers.compile_layers, recomputed=True)):
        model, divided = part_of(whole, ranks.rank, ranks.world_size)
        model = copy.deepcopy(model)
        form(model)
        logprobs_T, _, gradients = computed(model, divided)
        assert gradients.keys() == expected[2].keys()
        away += [
            difference(logprobs_T, expected[0]),
            *(difference(gradients[name], expected[2][name]) for name in gradients),
        ]
    return away


@pytest.mark.slow
def test_layers_in_parts_can_be_copied_recomputed_and_compiled() -> None:
    assert max(max(away) for away in on_ranks(2, in_other_forms, "Qwen3", limit_s=LIMIT_S)) <= TOLERANCE


def prepared_in_bf16(ranks: Ranks, family: str) -> tuple[bool, float, float]:
    """Return whether parts agree to the bit, and how far bf16 is from float32 in parts and in the full model."""
    layers.bf16_is_emulated = lambda: True  # type: ignore[assignment]
    whole = whole_model(FAMILIES[family]())
    model, divided = part_of(whole, ranks.rank, ranks.world_size)
    expected = PreparedModel(whole).logprobs(batch(), 1.0)[0]
    check_layers(model.bfloat16(), divided)
    of_both = []
    for narrow, part in ((model, divided), (whole.bfloat16(), None)):
        prepared = prepare(narrow, TrainConfig.of(model_name="m").compute, parallel=part)
        of_both.append(prepared.logprobs(batch(), 1.0)[0])
    are_equal = all(torch.equal(of_both[0], other) for other in ranks.all_gather_object(of_both[0].detach()))
    in_parts, of_whole = (float((logprobs_T - expected).detach().abs().mean()) for logprobs_T in of_both)
    return are_equal, in_parts, of_whole


@pytest.mark.parametrize("family", ["Llama 2", "Qwen3-MoE"])
def test_bf16_in_parts_rounds_like_the_full_model(family: str) -> None:
    """One family has row layers with biases, which a widened layer must leave to the sum."""
    for are_equal, in_parts, of_whole in on_ranks(2, prepared_in_bf16, family, limit_s=LIMIT_S):
        assert are_equal
        assert in_parts < 3 * of_whole < 0.1


def with_a_cut_head(ranks: Ranks, cap: float | None, filters: bool, compiles: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the results and gradients of a head in parts, and those of the full head."""
    logprobs.BLOCK_ELEMENTS["cpu"], logprobs.BLOCK_WORDS = 500, 32
    torch.manual_seed(0)
    leaves = [torch.randn(20, 16), torch.randn(301, 16), torch.randn(301)]
    targets, start = torch.randint(301, (20,)), 160 * ranks.rank
    kept = Kept(torch.full((20,), 1.5), torch.linspace(1, 60, 20).round()) if filters else None
    assert dist.group.WORLD is not None
    words, own = VocabularyPart(start, dist.group.WORLD.group_name), slice(start, min(start + 160, 301))
    by = LogitTransform(temperature=0.7, final_logit_softcapping=cap)
    pairs = []
    for given, rows in ((words, own), (None, slice(None))):
        mine = [leaf[rows] if index else leaf for index, leaf in enumerate(leaves)]
        mine = [leaf.clone().requires_grad_() for leaf in mine]
        hidden, head, bias = mine
        logprobs_T, entropies_T, _ = token_logprobs(
            hidden, head, bias, targets, by, compiles, kept, given, differentiates_entropies=True
        )
        (logprobs_T * torch.linspace(-1, 1, 20) + entropies_T * torch.linspace(2, -1, 20)).sum().backward()
        pairs.append(
            [logprobs_T.detach(), entropies_T.detach(), *(leaf.grad for leaf in mine if leaf.grad is not None)]
        )
    pairs[1][3:] = [gradient[own] for gradient in pairs[1][3:]]
    return list(zip(*pairs, strict=True))


@pytest.mark.parametrize(
    ("cap", "filters", "compiles"),
    [(None, False, False), (2.0, True, False), pytest.param(2.0, True, True, marks=pytest.mark.slow)],
)
def test_tensor_parallel_head_matches_the_full_head(cap: float | None, filters: bool, compiles: bool) -> None:
    for pairs in on_ranks(2, with_a_cut_head, cap, filters, compiles, limit_s=LIMIT_S):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def with_a_teacher(ranks: Ranks, num_words: int, is_cut: bool) -> list[tuple[Tensor, Tensor]]:
    """Return divergences and gradients of a head in parts, and those of the full head, from the same teacher."""
    logprobs.BLOCK_ELEMENTS["cpu"], logprobs.BLOCK_WORDS = 500, 32
    torch.manual_seed(0)
    leaves = [torch.randn(20, 16), torch.randn(301, 16), torch.randn(301)]
    hidden_NG, head_VG = torch.randn(20, 24) / 2, torch.randn(num_words, 24) / 2
    targets, start = torch.randint(301, (20,)), 160 * ranks.rank
    assert dist.group.WORLD is not None
    words, own = VocabularyPart(start, dist.group.WORLD.group_name), slice(start, min(start + 160, 301))
    by = LogitTransform(temperature=0.7)
    whole = Prediction(hidden_NG=hidden_NG, head_VG=head_VG, bias_V=None, by=by)
    part = replace(whole, head_VG=head_VG[own], words=words)  # as if the policy taught itself
    pairs = []
    for given, rows, prediction in ((words, own, part if is_cut else whole), (None, slice(None), whole)):
        mine = [leaf[rows] if index else leaf for index, leaf in enumerate(leaves)]
        mine = [leaf.clone().requires_grad_() for leaf in mine]
        teacher = Comparison(Divergence(kind="jsd", beta=0.3), prediction)
        scores = token_logprobs(mine[0], mine[1], mine[2], targets, by, False, None, given, teacher=teacher)
        assert scores.divergences_N is not None
        (scores.logprobs_NX + scores.divergences_N * torch.linspace(2, -1, 20)).sum().backward()
        pairs.append([scores.divergences_N.detach(), *(leaf.grad for leaf in mine if leaf.grad is not None)])
    pairs[1][2:] = [gradient[own] for gradient in pairs[1][2:]]
    return list(zip(*pairs, strict=True))


@pytest.mark.parametrize(("num_words", "is_cut"), [(301, True), (301, False), (330, False), (250, False), (100, False)])
def test_divergences_of_a_divided_head_match_the_full_head(num_words: int, is_cut: bool) -> None:
    """A teacher with fewer words than the first part has leaves the second part without a divergence."""
    for pairs in on_ranks(2, with_a_teacher, num_words, is_cut, limit_s=LIMIT_S):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def combined(ranks: Ranks) -> list[tuple[Shared, Tensor, Tensor]]:
    """Return the shared elements of this part's gradients, before and after they are combined."""
    _, divided = part_of(whole_model(FAMILIES["Qwen3-MoE"]()), ranks.rank, ranks.world_size)
    torch.manual_seed(ranks.rank)
    cuts = divided.cuts[divided.part]
    gradients = {name: torch.randn(cut.part_shape).bfloat16() for name, cut in cuts.items()}
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    divided.combine(gradients)
    return [
        (
            shared,
            shared.of(before[shared.name], cuts[shared.name]),
            shared.of(gradients[shared.name], cuts[shared.name]),
        )
        for shared in divided.shared
        if ranks.rank in shared.parts
    ]


def test_parts_that_share_elements_get_equal_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "FLAT_ELEMENTS", 20_000)
    pieces: dict[Shared, list[tuple[Tensor, Tensor]]] = {}
    for combined_pieces in on_ranks(4, combined):
        for shared, before, after in combined_pieces:
            pieces.setdefault(shared, []).append((before, after))
    assert {len(shared.parts) for shared in pieces} == {2, 4}
    for shared, of_parts in pieces.items():
        shares = torch.stack([before.float() for before, _ in of_parts])
        expected = shares.sum(0).bfloat16() if shared.adds_up else of_parts[0][0]
        assert len(of_parts) == len(shared.parts)
        assert all(torch.equal(after, expected) for _, after in of_parts), shared


def test_config_of_a_tp_part_differs_only_in_its_heads() -> None:
    model = whole_model(FAMILIES["Qwen3"]())
    block = model.get_submodule("model.layers.0.self_attn")
    cut_layers.count_own_heads(block, 2)
    other = copy.deepcopy(model)
    attention.choose(model, attention.NAME)
    for checked_model, name in ((model, attention.NAME), (other, "sdpa")):
        heads: Any = checked_model.get_submodule("model.layers.0.self_attn").config
        assert (heads.num_attention_heads, heads.num_key_value_heads, heads._attn_implementation) == (2, 1, name)
        assert checked_model.config.num_attention_heads == 4
    attention.choose(other, attention.NAME)
    assert heads._attn_implementation == attention.NAME


def test_range_may_mix_shared_and_unshared_elements() -> None:
    """A fused parameter with one KV head: on the last part its queries, keys and values are adjacent."""
    cuts = [Cut((6,), (((0, 2), (4, 2)),)), Cut((6,), (((2, 4),),))]
    (shared,) = shared_elements([{"w": cut} for cut in cuts], {"w"})
    assert (shared.start, shared.length, shared.parts, shared.adds_up) == (4, 2, (0, 1), True)
    assert all(shared.of(cut.of(torch.arange(6)), cut).tolist() == [4, 5] for cut in cuts)
