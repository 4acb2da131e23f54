"""The token budget: its arithmetic, its choices, and what it does when memory runs out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bridge.config import TrainConfig
from bridge.errors import UsageError
from bridge.passes import attention
from bridge.passes import budget as module
from bridge.passes.budget import MASKED_TOKENS, SHARE, Budget
from bridge.passes.layers import ALL, ATTENTION, HOST_ATTENTION, HOST_INPUTS, INPUTS, Kept
from bridge.passes.packing import Sample
from bridge.passes.pass_cost import CPU_LOGITS_BYTES, PROBES, Cost, cost_on_gpu, free_memory, measure_cost
from bridge.passes.preparation import recompute_activations
from bridge.passes.prepared_model import PreparedModel
from bridge.planning.memory import FEW, HOST_SHARE, MOST_TOKENS, PINNED
from bridge.ranks.world import ALONE, Ranks
from tests.logged import nothing_logged

MIB = 2**20


def model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    config._attn_implementation = attention.NAME
    return LlamaForCausalLM(config).eval()


def samples(*lengths: int) -> list[Sample]:
    return [
        Sample(
            prompt_token_ids=(1,), token_ids=(1,) * (n - 1), sampled_logprobs=(0.0,) * (n - 1),
            advantages=(0.0,) * (n - 1), weight=1.0,
        )
        for n in lengths
    ]  # fmt: skip


class Memory:
    """A GPU with `free` MiB, on which a token takes `plain` MiB, or `recomputed` MiB with recomputed activations."""

    def __init__(self, free: float, *, plain: float | None, recomputed: float | None = None) -> None:
        self.free, self.plain, self.recomputed, self.measured = free, plain, recomputed, 0

    def measure(self, prepared: PreparedModel, temperature: float) -> Cost:
        assert temperature == 0.7
        self.measured += 1
        per_token = self.recomputed if prepared.model.is_gradient_checkpointing else self.plain
        if per_token is None:
            raise torch.OutOfMemoryError("out of memory")
        return Cost(fixed_bytes=100 * MIB, token_bytes=per_token * MIB)

    def free_bytes(self, model: PreTrainedModel) -> float:
        gradients = sum(int(p.nbytes) for p in model.parameters() if p.grad is None)
        return (self.free / SHARE) * MIB + gradients


class OnGpu(LlamaForCausalLM):
    """A model that claims to be on a GPU, with its own memory."""

    device = torch.device("cuda")
    memory: Memory


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query the memory of an `OnGpu` model instead of CUDA."""

    def cost(prepared: PreparedModel, temperature: float) -> Cost:
        measure = prepared.model.memory.measure if isinstance(prepared.model, OnGpu) else measure_cost
        return measure(prepared, temperature)

    def free(model: PreTrainedModel) -> float:
        return model.memory.free_bytes(model) if isinstance(model, OnGpu) else free_memory(model)

    monkeypatch.setattr(module, "measure_cost", cost)
    monkeypatch.setattr(module, "free_memory", free)


class Beside(Ranks):
    """The first of two ranks; the other one has a tenth of its numbers."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def all_gather_object(self, mine: Any) -> list[Any]:
        return [mine, mine // 10]


def budget(memory: Memory, trained: PreTrainedModel | None = None, parts: Ranks = ALONE, **choices: Any) -> Budget:
    config = TrainConfig.of(model_name="m", temperature=0.7, **choices)
    trained = model() if trained is None else trained
    trained.__class__ = OnGpu
    trained.memory = memory
    return budget_of(trained, config, parts=parts)


def budget_of(trained: PreTrainedModel, config: TrainConfig, parts: Ranks = ALONE) -> Budget:
    num_groups = config.rollouts.batch_size // config.sampling.group_size
    prepared = PreparedModel(trained)
    prepared.kept = INPUTS if config.compute.gradient_checkpointing else ALL  # as `prepare` leaves it
    return Budget(
        prepared,
        config.compute,
        config.optimizer,
        temperature=config.sampling.temperature,
        num_groups=num_groups,
        replicas=config.replicas,
        parts=parts,
    )


def test_two_measurements_give_fixed_and_per_token_cost() -> None:
    cost = Cost.of([(2048, 5096 * MIB), (1024, 3048 * MIB)])
    assert cost == Cost(fixed_bytes=1000 * MIB, token_bytes=2 * MIB)
    assert cost.tokens_in(9000 * MIB) == 4000
    assert cost.tokens_in(999 * MIB) == 0


def test_pass_of_constant_cost_fits_many_tokens() -> None:
    assert Cost.of([(1024, 5000), (2048, 4000)]).tokens_in(1e12) > MOST_TOKENS


def test_budget_fills_free_memory_and_is_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(10_100, plain=1)
    pass_budget = budget(memory)
    assert pass_budget.max_tokens(samples(300, 40)) == 10_000
    assert pass_budget.max_tokens(samples(5)) == 10_000
    assert memory.measured == 1
    assert caplog.messages == ["micro-batches of up to 10,000 tokens, in 9.9 GiB of free memory"]


@pytest.fixture
def _wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let float32 gradients take 500 MiB more."""
    monkeypatch.setattr("bridge.passes.budget._widening_bytes", lambda _: 500 * MIB / SHARE)


LARGE_BATCH = (1_000,) * 200


def sums_in_float32(pass_budget: Budget) -> bool | None:
    return pass_budget.sums_in_float32  # a function, since type checkers assume that an attribute keeps its value


@pytest.mark.usefixtures("_wider")
def test_float32_sums_are_used_if_memory_allows(caplog: pytest.LogCaptureFixture) -> None:
    pass_budget = budget(Memory(5_600, plain=1))
    assert pass_budget.max_tokens(samples(300, 40)) == 5_500
    assert sums_in_float32(pass_budget) is None  # a single pass needs no sum
    assert pass_budget.max_tokens(samples(*(1_000,) * 5 * FEW)) == 5_500
    assert sums_in_float32(pass_budget) is None  # a few passes are as exact as one
    assert pass_budget.max_tokens(samples(*LARGE_BATCH)) == 5_000
    assert sums_in_float32(pass_budget)
    assert caplog.messages[1:] == ["micro-batches of up to 5,000 tokens, beside gradients in float32"]
    assert pass_budget.max_tokens(samples(*LARGE_BATCH)) == 5_000


@pytest.mark.usefixtures("_wider")
@pytest.mark.parametrize(("micro_batch_tokens", "free"), [(None, 2_048 + 600), (2_000, 1_800 + 600)])
def test_bf16_sums_are_used_and_logged_if_memory_is_short(
    micro_batch_tokens: int | None, free: int, caplog: pytest.LogCaptureFixture
) -> None:
    least = micro_batch_tokens or 2_048  # nine tenths of this are enough
    pass_budget = budget(Memory(free - 1, plain=1), micro_batch_tokens=micro_batch_tokens)
    assert pass_budget.max_tokens(samples(*LARGE_BATCH)) == (micro_batch_tokens or least + 499)
    assert sums_in_float32(pass_budget) is False
    message = (
        "gradients are summed in bf16, because float32 needs 0.6 GiB more; over N micro-batches the error is about"
    )
    assert caplog.messages[-1].startswith(message)
    enough = budget(Memory(free, plain=1), micro_batch_tokens=micro_batch_tokens)
    assert enough.max_tokens(samples(*LARGE_BATCH)) == least
    assert sums_in_float32(enough)


def test_adapter_gradients_are_always_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.passes.budget._widening_bytes", lambda _: 10 * MIB)
    pass_budget = budget(Memory(600, plain=1, recomputed=1))
    assert pass_budget.max_tokens(samples(*(100,) * 400)) == 491
    assert sums_in_float32(pass_budget)


@pytest.mark.usefixtures("_wider")
def test_float32_sums_are_dropped_before_recomputing(caplog: pytest.LogCaptureFixture) -> None:
    trained = model()
    pass_budget = budget(Memory(3_100, plain=1, recomputed=0.01), trained)
    pass_budget.max_tokens(samples(*LARGE_BATCH))
    assert sums_in_float32(pass_budget)
    pass_budget.shrink(torch.OutOfMemoryError("CUDA out of memory."))
    assert sums_in_float32(pass_budget) is False
    assert caplog.messages[-1].startswith(
        "out of memory: gradients are summed in bf16 from now on; over N micro-batches"
    )
    assert not trained.is_gradient_checkpointing
    pass_budget.shrink(torch.OutOfMemoryError("CUDA out of memory."))
    assert trained.is_gradient_checkpointing


@pytest.mark.parametrize("choices", [{"gradient_release": True, "offload_optimizer": True}, {}])
def test_float32_sums_need_no_widening(choices: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    trained = model().bfloat16() if choices else model()
    pass_budget = budget(Memory(10_100, plain=1), trained, **choices)
    pass_budget.max_tokens(samples(*LARGE_BATCH))
    assert sums_in_float32(pass_budget) is False
    assert len(caplog.messages) == 1


def bf16_error(gradients: Tensor) -> float:
    """Return the error of a running sum in bf16, as a share of the largest partial sum."""
    total, exact, largest = gradients[0].clone(), gradients[0].double(), 0.0
    for gradient in gradients[1:]:
        total += gradient
        exact += gradient.double()
        largest = max(largest, float(exact.norm()))
    return float((total - exact).norm()) / largest


@pytest.mark.parametrize("count", [2, 16, 128, 512])
def test_bf16_sum_error_is_within_the_reported_bound(count: int) -> None:
    torch.manual_seed(0)
    noise, turn = torch.randn(count, 4_000), torch.linspace(-1, 1, count).sign()[:, None]
    for gradients in (noise, noise + 0.3, noise + 1, noise + turn):  # the last ones cancel
        assert 0 < bf16_error(gradients.bfloat16()) <= count**0.5 / 512
    error = bf16_error(torch.full((count, 10), 1.0).bfloat16())
    assert error <= count / 512
    assert (error > 0.4) == (count == 512), "it must be far above the error of noise"


@pytest.mark.parametrize(("free", "short"), [(4_100, False), (1_100, True), (0, True)])
def test_memory_is_short_if_activations_must_be_recomputed(
    free: int, short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trained = model()
    pass_budget = budget(Memory(free, plain=1, recomputed=0.01), trained)
    assert pass_budget.is_short(samples(1_500, 1_500)) == short
    assert not trained.is_gradient_checkpointing  # nothing has been chosen yet
    assert caplog.messages == []


def test_memory_is_short_if_the_chosen_tokens_do_not_fit() -> None:
    batch = samples(*(1_000,) * 20)
    assert budget(Memory(4_100, plain=1), micro_batch_tokens=5_000).is_short(batch)
    assert not budget(Memory(4_100, plain=1), micro_batch_tokens=3_000).is_short(batch)
    assert not budget_of(model(), TrainConfig.of(model_name="m")).is_short(batch)


def test_existing_gradients_are_not_counted_twice() -> None:
    trained, memory = model(), Memory(10_100, plain=1)
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert budget(memory, trained).max_tokens(samples(300)) == 10_000


def test_micro_batch_size_has_an_upper_bound() -> None:
    assert budget(Memory(100_000, plain=1)).max_tokens(samples(300)) == MOST_TOKENS
    released = budget(Memory(100_000, plain=1), gradient_release=True)
    assert released.max_tokens(samples(300)) > MOST_TOKENS  # here an update is a single pass
    masked = model()
    masked.config._attn_implementation = "sdpa"
    assert budget(Memory(100_000, plain=1), masked).max_tokens(samples(300)) == MASKED_TOKENS


@pytest.mark.parametrize(
    ("free", "lengths", "recomputed"),
    [
        (4_100, (3_000,), False),  # fits
        (4_100, (5_000,), True),  # the longest sample does not fit
        (1_100, (900, 900, 900), True),  # too few to keep a GPU busy
        (1_100, (400, 400), False),  # few tokens, but there are no more
    ],
)
def test_activations_are_recomputed_if_too_few_tokens_fit(
    free: int, lengths: tuple[int, ...], recomputed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trained = model()
    tokens = budget(Memory(free, plain=1, recomputed=0.1), trained).max_tokens(samples(*lengths))
    assert trained.is_gradient_checkpointing == recomputed
    assert tokens == min((free - 100) * (10 if recomputed else 1), MOST_TOKENS)
    recomputing = [note.startswith("activations are recomputed") and ": without, " in note for note in caplog.messages]
    assert recomputing == [True, False][not recomputed :]


@pytest.mark.parametrize(
    ("choices", "longest", "fits", "ways"),
    [
        ({}, 5_000, ALL, [ALL]),
        ({}, 5_000, ATTENTION, [ALL, ATTENTION]),
        ({}, 5_000, HOST_ATTENTION, [ALL, ATTENTION, HOST_ATTENTION]),
        ({}, 5_000, HOST_INPUTS, [ALL, ATTENTION, HOST_ATTENTION, HOST_INPUTS]),
        ({}, 4_000, HOST_INPUTS, [ALL, INPUTS, HOST_INPUTS]),
        ({"activation_offload": False}, 5_000, None, [ALL, ATTENTION, INPUTS]),
        ({"gradient_checkpointing": True}, 5_000, None, [ATTENTION, HOST_ATTENTION, HOST_INPUTS]),
        ({"gradient_checkpointing": False}, 5_000, None, [ALL]),
        ({"activation_offload": True}, 5_000, HOST_ATTENTION, [HOST_ATTENTION]),
        ({"activation_offload": True}, 4_000, HOST_INPUTS, [HOST_INPUTS]),
    ],
)
def test_layers_keep_what_fits_with_the_longest_sample(
    choices: dict[str, Any], longest: int, fits: Kept | None, ways: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[Kept]()
    pass_budget = budget(Memory(10_100, plain=1), **choices)

    def fitting(free: float) -> int:
        measured.append(pass_budget._prepared.kept)
        return 10_000 if pass_budget._prepared.kept == fits else 1_000

    monkeypatch.setattr(pass_budget, "_fitting", fitting)
    assert pass_budget.max_tokens(samples(longest)) == (10_000 if fits else longest)
    assert measured == ways
    assert pass_budget.max_tokens(samples(longest)) == (10_000 if fits else longest)
    assert measured == ways  # measured only once


def test_activations_go_to_the_host_only_if_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, long = budget(Memory(1_100, plain=1, recomputed=0.7)), budget(Memory(1_100, plain=1, recomputed=0.7))
    assert few.max_tokens(samples(900, 900, 900)) == 1_428  # too few to keep a GPU busy
    assert few._prepared.kept == INPUTS
    monkeypatch.setattr(module, "left_bytes", lambda: 10_000)
    long.max_tokens(samples(5_000))
    assert long._prepared.kept == INPUTS


@pytest.mark.parametrize(("fits", "kept"), [(INPUTS, INPUTS), (HOST_INPUTS, HOST_INPUTS), (None, HOST_INPUTS)])
def test_layers_keep_less_until_a_single_pass_update_fits(
    fits: Kept | None, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_budget = budget(Memory(10_100, plain=1), gradient_release=True)
    monkeypatch.setattr(pass_budget, "_fitting", lambda _: 20_000 if pass_budget._prepared.kept == fits else 10_000)
    assert pass_budget.max_tokens(samples(*(3_000,) * 5)) == (20_000 if fits else 10_000)
    assert pass_budget._prepared.kept == kept


def test_ranks_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, one_of_four = (budget(Memory(1_100, plain=1, recomputed=0.7)) for _ in range(2))
    one_of_four._neighbors = 4
    monkeypatch.setattr(module, "left_bytes", lambda: 2 * int(PINNED * 2 * 5_000 * (32 + 32) / HOST_SHARE))
    for pass_budget, kept in ((alone, HOST_INPUTS), (one_of_four, INPUTS)):
        pass_budget.max_tokens(samples(5_000))
        assert pass_budget._prepared.kept == kept


@pytest.mark.parametrize("offloads", [None, False])
def test_chosen_size_keeps_activations_for_the_longest_sample(offloads: bool | None) -> None:
    choices: dict[str, Any] = {
        "micro_batch_tokens": 6_000, "gradient_checkpointing": True, "activation_offload": offloads
    }  # fmt: skip
    for longest, kept in ((5_000, ATTENTION), (3_000, INPUTS)):
        pass_budget = budget(Memory(1, plain=1), **choices)
        pass_budget.max_tokens(samples(longest))
        assert pass_budget._prepared.kept == kept


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offload_needs_a_gpu_and_recomputed_activations(device: str) -> None:
    recomputes = device == "cpu"
    config = TrainConfig.of(model_name="m", activation_offload=True, gradient_checkpointing=recomputes)
    trained = model()
    trained.__class__ = OnGpu if device == "cuda" else LlamaForCausalLM
    with pytest.raises(UsageError, match=r"--activation-offload works only on a GPU, and with recomputed activations"):
        budget_of(trained, config)


def test_activations_are_not_recomputed_if_turned_off() -> None:
    trained = model()
    pass_budget = budget(Memory(1_100, plain=1, recomputed=0.1), trained, gradient_checkpointing=False)
    assert pass_budget.max_tokens(samples(5_000)) == 5_000  # a single sequence must be tried
    assert not trained.is_gradient_checkpointing


def test_probe_out_of_memory_leads_to_recomputing() -> None:
    trained = model()
    assert budget(Memory(1_100, plain=None, recomputed=0.1), trained).max_tokens(samples(300)) == 10_000
    assert trained.is_gradient_checkpointing


def test_configured_sizes_need_no_probe() -> None:
    memory = Memory(1, plain=1)
    assert budget(memory, micro_batch_tokens=777).max_tokens(samples(5_000)) == 777
    assert memory.measured == 0


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, available: float, limit: float | None, **choices: Any) -> Budget:
    """Return the budget on a host with this many MiB available, in a container with this memory limit."""
    monkeypatch.setattr("bridge.core.host_memory.available_bytes", lambda: int(available * MIB))
    monkeypatch.setattr(
        "bridge.core.host_memory.cgroup_left_bytes", lambda: None if limit is None else int(limit * MIB)
    )
    trained = model()
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return budget_of(trained, TrainConfig.of(model_name="m", temperature=0.7, **choices))


@pytest.mark.parametrize(("available", "limit"), [(400, None), (400, 10_000), (10_000, 400)])
def test_cpu_budget_respects_the_containers_memory_limit(
    monkeypatch: pytest.MonkeyPatch, available: float, limit: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    max_tokens = on_the_cpu(monkeypatch, available, limit, gradient_checkpointing=False).max_tokens(samples(300))
    cost = measure_cost(PreparedModel(model()), 0.7)
    assert cost is not None
    assert max_tokens == cost.tokens_in(HOST_SHARE * 400 * MIB)
    assert 2_000 < max_tokens < MOST_TOKENS
    assert caplog.messages == [f"micro-batches of up to {max_tokens:,} tokens, in 0.2 GiB of free memory"]
    assert on_the_cpu(monkeypatch, 100_000, None).max_tokens(samples(300)) == MOST_TOKENS


def test_cpu_tries_a_too_long_sequence_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert on_the_cpu(monkeypatch, 1, None).max_tokens(samples(300)) == 300
    assert caplog.messages[-1] == "a sequence of 300 tokens may not fit: the system may kill the process"


def test_cpu_pass_cost_counts_tensors_kept_by_autograd() -> None:
    def layered(layers: int) -> PreTrainedModel:
        config = LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4
        )
        config._attn_implementation = attention.NAME
        return LlamaForCausalLM(config).eval()

    def token_bytes(model: PreTrainedModel) -> float:
        cost = measure_cost(PreparedModel(model), 0.7)
        assert cost is not None
        assert cost.fixed_bytes >= CPU_LOGITS_BYTES
        assert all(parameter.grad is None for parameter in model.parameters())
        return cost.token_bytes

    few, many = layered(8), layered(16)
    layer = (token_bytes(many) - token_bytes(few)) / 8
    assert layer > 4 * (4 * 512 + 4 * 64)  # gate, activated gate, up, their product, and tensors of width 64
    with nothing_logged():
        recompute_activations(PreparedModel(many))
    assert many.is_gradient_checkpointing
    assert token_bytes(many) < token_bytes(layered(16)) - 10 * layer
    assert many.is_gradient_checkpointing, "it must not change"


def test_out_of_memory_halves_then_recomputes_then_raises(caplog: pytest.LogCaptureFixture) -> None:
    trained = model()
    pass_budget = budget(Memory(1, plain=1), trained, micro_batch_tokens=16_384)
    batch, states = samples(*(1_500,) * 20), []
    for _ in range(6):
        states.append((pass_budget.max_tokens(batch), trained.is_gradient_checkpointing))
        pass_budget.shrink(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    states.append((pass_budget.max_tokens(batch), trained.is_gradient_checkpointing))
    assert states == [
        (16_384, False), (8_192, False), (4_096, False), (2_048, False), (2_048, True), (1_500, True),
        (1_500, True),
    ]  # fmt: skip
    assert pass_budget._prepared.kept == HOST_INPUTS
    assert [note.partition(":")[0] for note in caplog.messages] == ["out of memory"] * 6
    with pytest.raises(UsageError, match=r"a sequence of 1,500 tokens does not fit"):
        pass_budget.shrink(torch.OutOfMemoryError("CUDA out of memory"))


def test_single_sequence_that_does_not_fit_is_refused() -> None:
    pass_budget = budget(Memory(1, plain=1), micro_batch_tokens=1_000, gradient_checkpointing=False)
    pass_budget.max_tokens(samples(1_200))
    with pytest.raises(
        UsageError, match=r"a sequence of 1,200 tokens does not fit .* Tried to allocate 2 GiB"
    ) as caught:
        pass_budget.shrink(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert caught.value.hint == "--gradient-checkpointing, which recomputes activations"


def test_pair_that_does_not_fit_is_refused() -> None:
    pass_budget = budget(Memory(1, plain=1), micro_batch_tokens=1_000, gradient_checkpointing=False)
    pair = [
        replace(sample, pair=0, advantages=(sign,) * len(sample.advantages))
        for sample, sign in zip(samples(700, 800), (1.0, -1.0), strict=True)
    ]
    assert pass_budget.max_tokens(pair) == 1_000
    with pytest.raises(
        UsageError, match="a pair of 1,500 tokens does not fit into the free memory: CUDA out of memory"
    ):
        pass_budget.shrink(torch.OutOfMemoryError("CUDA out of memory"))


def test_budget_larger_than_the_batch_shrinks_to_half_the_batch() -> None:
    pass_budget = budget(Memory(1, plain=1), micro_batch_tokens=60_000, gradient_checkpointing=False)
    pass_budget.max_tokens(samples(1_000, 1_000, 1_000))
    pass_budget.shrink(torch.OutOfMemoryError("out of memory"))
    assert pass_budget.max_tokens(samples(1_000, 1_000, 1_000)) == 1_500


def test_failed_pass_frees_its_memory() -> None:
    class Held:
        alive = 0

        def __init__(self) -> None:
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    def fail() -> None:
        held = Held()
        raise torch.OutOfMemoryError(f"out of memory with {held}")

    pass_budget = budget(Memory(1, plain=1), micro_batch_tokens=60_000)
    pass_budget.max_tokens(samples(1_000, 5_000))
    try:
        fail()
    except torch.OutOfMemoryError as error:
        assert Held.alive == 1
        pass_budget.shrink(error)
        assert Held.alive == 0


def test_probe_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's memory statistics are replaced: a pass takes 7 bytes, plus 3 per token."""
    trained, probed = model(), list[int]()
    trained.get_decoder().register_forward_hook(
        lambda _module, _inputs, output: probed.append(output.last_hidden_state.shape[1])
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1007 + 3 * probed[-1])
    assert cost_on_gpu(PreparedModel(trained), 0.7) == Cost(fixed_bytes=7, token_bytes=3)
    assert tuple(probed) == PROBES
    assert all(parameter.grad is None for parameter in trained.parameters())


def test_tp_ranks_use_the_size_that_fits_on_all_ranks() -> None:
    pass_budget = budget(Memory(10_100, plain=1), parts=Beside())
    assert pass_budget.max_tokens(samples(30)) == (10_100 // 10 - 100) // 10  # limited by the other rank


def test_tp_rank_does_not_retry_an_out_of_memory_pass() -> None:
    """The other ranks wait for it in the middle of a pass."""
    pass_budget = budget(Memory(1_100, plain=None, recomputed=0.1), parts=Beside())
    with pytest.raises(torch.OutOfMemoryError):
        pass_budget.max_tokens(samples(300))
