"""Packs sliced over several ranks have the log-probabilities, gradients and steps of a single process.

In float32 the largest difference was 4e-5, in a gradient far smaller than the largest one (2026-11-26). A wrong
exchange shows in the first digits.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3NextConfig

from bridge.errors import RankError, UnsupportedModelError
from bridge.passes import attention, layers, slices
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.parallel_proof import check_slices
from bridge.passes.preparation import prepare
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.slices import Slices
from bridge.ranks.world import ALONE, Ranks
from tests.logged import logged
from tests.models import tiny
from tests.unit.passes.test_attention import FAMILIES, SIZES
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu
from tests.unit.run.test_learner import base, config_of, learner_of, made_by
from tests.unit.several_ranks import on_ranks

TOLERANCE = 1e-3
"""25 times the measured rounding error. Log-probabilities in nats are compared relative to the largest one if that
exceeds 1, and gradients relative to their norm."""
FLOOR = 1e-3
"""Gradients are compared relative to at least this share of the largest one: some are zero except for rounding."""
LENGTHS = {"several sequences": (19, 12, 7, 6, 5), "one long sequence": (31,), "fewer tokens than ranks": (3,)}
"""Sequences have at least three tokens, and the first two differ: with one key, or equal keys, the gradients of queries
and keys are zero except for rounding."""
LIMIT_S = 110.0
OF_HEADS = Qwen2Config(**(SIZES | {"num_attention_heads": 12, "hidden_size": 48}))
"""Four query heads for each of three key-value heads."""
OF_HEADS.num_key_value_heads = 3


def pack_of(lengths: tuple[int, ...], *, share_prompts: bool, is_filtered: bool = False) -> MicroBatch:
    """Pack samples with these numbers of tokens; every two consecutive samples have the same prompt."""
    chance, samples = torch.Generator().manual_seed(0), list[Sample]()
    for number, length in enumerate(lengths):
        ids = tuple(torch.randint(3, 97, (length,), generator=chance).tolist())
        prompt = samples[-1].prompt_token_ids if number % 2 else ids[: min(3, length - 1)]
        completion = ids[len(prompt) :]
        zeros = (0.0,) * len(completion)
        kept = tuple((0.0, 20 + token % 9) for token in completion) if is_filtered else ()
        samples.append(
            Sample(
                prompt_token_ids=prompt,
                token_ids=completion,
                sampled_logprobs=zeros,
                advantages=zeros,
                weight=1.0,
                kept=kept,
            )
        )
    (pack,) = packs(samples, max_tokens=1000, device=torch.device("cpu"), share_prompts=share_prompts)
    return pack


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    own = copy.deepcopy(config)
    own.initializer_range = 0.2  # so that attention matters more than rounding
    model: PreTrainedModel = AutoModelForCausalLM.from_config(own).float().eval()
    attention.choose(model, attention.NAME)
    return model


def cut_model_of(config: PreTrainedConfig, ranks: Ranks) -> PreparedModel:
    prepared = PreparedModel(model_of(config))
    prepared.slices = slices.cut(prepared.model, ranks.cp_group)
    return prepared


def computed(prepared: PreparedModel, pack: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return log-probabilities, entropies, and the gradients of a loss that weighs each row differently."""
    prepared.model.zero_grad()
    logprobs_N, entropies_N = prepared.logprobs(pack, 0.7)
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N)).add(0.3)).sum().backward()
    named = prepared.model.named_parameters()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
    return logprobs_N.detach(), entropies_N, gradients


def compared(ranks: Ranks, config: PreTrainedConfig) -> dict[str, float]:
    """Return the largest difference between sliced and full packs, by pack."""
    prepared, worst = cut_model_of(config, ranks), dict[str, float]()
    for name, lengths in LENGTHS.items():
        for share_prompts in (False, True):
            pack = pack_of(lengths, share_prompts=share_prompts, is_filtered=share_prompts)
            with prepared.uncut():
                logprobs_N, entropies_N, gradients = computed(prepared, pack)
            own_logprobs_N, own_entropies_N, own_gradients = computed(prepared, pack)
            least = FLOOR * max(gradient.norm() for gradient in gradients.values())
            both = (own_logprobs_N, logprobs_N), (own_entropies_N, entropies_N)
            differences = [(own - whole).abs().max() / whole.abs().max().clamp(min=1) for own, whole in both]
            sums = ranks.all_reduce(torch.cat([gradient.flatten() for gradient in own_gradients.values()]))
            sums_by_parameter = sums.split([gradient.numel() for gradient in gradients.values()])
            for summed, gradient in zip(sums_by_parameter, gradients.values(), strict=True):
                differences.append((summed - gradient.flatten()).norm() / max(gradient.norm(), least))
            worst[f"{name}, {share_prompts}"] = float(torch.stack(differences).max())
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_match_full_packs_for_every_attention(family: str) -> None:
    """Four ranks are more than there are key-value heads."""
    for result in on_ranks(4, compared, FAMILIES[family], cp_size=4, limit_s=LIMIT_S):
        assert max(result.values()) < TOLERANCE, result


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_ranks_receive_the_key_value_heads_they_need(size: int) -> None:
    """Three key-value heads for twelve query heads: all on each rank, one per rank, and in uneven groups."""
    for result in on_ranks(size, compared, OF_HEADS, cp_size=size, limit_s=LIMIT_S):
        assert max(result.values()) < TOLERANCE, result


@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_slices_cover_a_pack(num_tokens: int) -> None:
    tokens_T = torch.arange(1, num_tokens + 1)
    own = [Slices("", tuple(i == rank for i in range(4))).own(tokens_T) for rank in range(4)]
    assert {len(slice_) for slice_ in own} == {math.ceil(num_tokens / 4)}
    whole = torch.cat(own)
    assert whole[:num_tokens].equal(tokens_T)
    assert not whole[num_tokens:].any()


def reported(ranks: Ranks) -> list[str]:
    """Prepare and check a sliced model, and return the logged lines."""
    model = model_of(FAMILIES["qwen3"])
    attention.choose(model, "sdpa")
    with logged() as lines:
        prepared = prepare(model, config_of().compute, ranks=ranks)
    assert prepared.slices is not None
    assert prepared.shares_prompts
    return lines


def test_sliced_model_is_prepared_and_checked() -> None:
    assert on_ranks(2, reported, cp_size=2, limit_s=LIMIT_S) == [[], []]


def compiled(ranks: Ranks) -> tuple[int, float]:
    """Compile a sliced model's layers with the variable-length kernel; return graph breaks and the largest error."""
    prepared = cut_model_of(FAMILIES["qwen3"], ranks)
    pack = pack_of(LENGTHS["one long sequence"], share_prompts=False)
    attention._fits_kernel = lambda *_: True
    with kernel_on_the_cpu():
        logprobs_N, _, _ = computed(prepared, pack)
        layers.COMPILER = "aot_eager"
        torch._dynamo.utils.counters.clear()  # from earlier tests
        layers.compile_layers(prepared.model)
        own_logprobs_N, _, _ = computed(prepared, pack)
    return sum(torch._dynamo.utils.counters["graph_break"].values()), float((own_logprobs_N - logprobs_N).abs().max())


def test_compiled_layers_and_exchanges_are_one_graph() -> None:
    """Several graphs could not be recomputed by the compiler."""
    for num_breaks, difference in on_ranks(2, compiled, cp_size=2, limit_s=LIMIT_S):
        assert num_breaks == 0
        assert difference < TOLERANCE


def spoiled(ranks: Ranks, fault: str) -> None:
    """Check a model whose exchange is wrong."""
    to_heads, own_heads = Slices.to_heads, Slices.own_heads
    if fault == "a gradient that is lost":
        Slices.to_heads = lambda self, query, key, value: to_heads(self, query, key.detach(), value)  # type: ignore[method-assign]
    else:
        Slices.own_heads = lambda self, x: own_heads(self, x.flip(0))  # type: ignore[method-assign,assignment]
    check_slices(cut_model_of(FAMILIES["gpt-oss, with sinks"], ranks))


@pytest.mark.parametrize("fault", ["a gradient that is lost", "sinks of other heads"])
def test_wrong_exchange_is_refused(fault: str) -> None:
    for error in on_ranks(2, spoiled, fault, cp_size=2, limit_s=LIMIT_S):
        assert isinstance(error, UnsupportedModelError), error
        assert "computed on 2 slices, differs by" in error.message


def refused(ranks: Ranks, config: PreTrainedConfig) -> None:
    cut_model_of(config, ranks)


def test_layers_that_cannot_be_sliced_are_refused_by_name() -> None:
    hybrid = Qwen3NextConfig(**SIZES, num_experts=0, layer_types=["linear_attention", "full_attention"])
    for error in on_ranks(2, refused, hybrid, cp_size=2):
        assert "carries a state from token to token" in str(error)
    for error in on_ranks(3, refused, FAMILIES["llama"], cp_size=3):
        assert "does not divide the 4 attention heads of LlamaForCausalLM" in str(error)


def own_attention(ranks: Ranks) -> None:
    prepared = cut_model_of(FAMILIES["llama"], ranks)
    attention.choose(prepared.model, "sdpa")
    computed(prepared, pack_of((5,), share_prompts=False))


def test_slicing_refuses_attention_other_than_bridges() -> None:
    for error in on_ranks(2, own_attention, cp_size=2):
        assert "LlamaForCausalLM uses its own attention" in str(error)


def learnt(ranks: Ranks, groups: list[Any], choices: dict[str, Any]) -> dict[str, Any]:
    """Train for two steps in float32."""
    model = base()
    learner, figures = learner_of(model, ranks=ranks, **choices), []
    for step in (1, 2):
        learner.take(groups, step=step)
        learner.prepare()
        learner.write()
        figures.append(learner.learnt())
    return {"weights": {name: p.detach().clone() for name, p in model.named_parameters()}, "figures": figures}


CHOICES: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "the most uncertain, in small packs": {"top_entropy": 0.3, "micro_batch_tokens": 40},
    "sequences, twice": {"loss": "gspo", "passes_per_batch": 2, "updates_per_batch": 2},
    "an entropy bonus": {"entropy_coef": 0.1},
}


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(("world_size", "cp_size"), [(2, 2), (4, 2)])
def test_sliced_training_matches_one_process(choices: str, world_size: int, cp_size: int) -> None:
    groups = made_by(base(seed=8))
    alone, before = learnt(ALONE, groups, CHOICES[choices]), dict(base().named_parameters())
    results = on_ranks(world_size, learnt, groups, CHOICES[choices], cp_size=cp_size, limit_s=LIMIT_S)
    for mine in results:
        assert not isinstance(mine, BaseException), mine
        for name, weight in alone["weights"].items():
            assert mine["weights"][name].equal(results[0]["weights"][name]), "replicas differ"
            moved = weight - before[name].detach()
            assert (mine["weights"][name] - weight).norm() < 0.01 * moved.norm(), name
        for one, other in zip(mine["figures"], alone["figures"], strict=True):
            assert one["tokens_trained"] == other["tokens_trained"]
            assert one["train_flops"] == pytest.approx(other["train_flops"], rel=0.2)
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
            assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)


def test_second_model_as_reference_is_sliced_and_checked(tmp_path: Path) -> None:
    folder = tiny.write(tiny.llama(), tmp_path / "model", seed=3)
    groups, choices = made_by(base(seed=8)), {"kl_coef": 0.5, "reference_model": str(folder)}
    alone = learnt(ALONE, groups, choices)
    for mine in on_ranks(2, learnt, groups, choices, cp_size=2, limit_s=LIMIT_S):
        assert not isinstance(mine, BaseException), mine
        for one, other in zip(mine["figures"], alone["figures"], strict=True):
            assert other["kl"] > 0.01
            assert one["kl"] == pytest.approx(other["kl"], rel=1e-3)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def lost_inside(ranks: Ranks) -> None:
    """Compute two passes; one rank leaves the second pass between the exchanges of two layers."""
    prepared, pack = cut_model_of(FAMILIES["llama"], ranks), pack_of((31,), share_prompts=False)

    def leave(*_: object) -> None:
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("made up")

    def compute() -> None:
        with ranks.in_pass():
            computed(prepared, pack)
            second: nn.Module = layers.decoder_layers(prepared.model)[1]
            second.register_forward_pre_hook(leave)
            computed(prepared, pack)

    ranks.run_on_all(compute)


def test_out_of_memory_on_one_rank_ends_all_ranks() -> None:
    for error in on_ranks(2, lost_inside, cp_size=2):
        assert isinstance(error, RankError)
        assert "out of memory: made up" in error.message or "stopped in a pass" in error.message
