"""Router replay: every family computes with given experts, whether packed, sliced, recomputed or compiled."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    Dots1Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SolarOpenConfig,
)

from bridge.config import TrainConfig
from bridge.errors import UnsupportedModelError
from bridge.passes import attention, layers, routing, slices
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.passes.routing import RouterReplay
from bridge.ranks.world import Ranks
from bridge.run.step_batch import Batch, Computed
from bridge.weights.adapter import Adapter
from tests.unit.passes.test_attention import SIZES
from tests.unit.passes.varlen_kernel import kernel_on_the_cpu
from tests.unit.several_ranks import on_ranks

CPU = torch.device("cpu")
NUM_EXPERTS, NUM_CHOSEN = 6, 2
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
LOCAL = SIZES | {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN}
EXPERTS = SIZES | {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": 24}
ROUTED = SIZES | {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": 24}
GROUPS = {"n_group": 3, "topk_group": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
FAMILIES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**LOCAL),
    "qwen 2 moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=24),
    "qwen 3 moe": Qwen3MoeConfig(**EXPERTS, head_dim=8, norm_topk_prob=True),
    "qwen 3 next": Qwen3NextConfig(
        **EXPERTS, shared_expert_intermediate_size=24, layer_types=["full_attention", "full_attention"]
    ),
    "olmoe": OlmoeConfig(**EXPERTS),
    "granite moe": GraniteMoeConfig(**LOCAL),
    "gpt-oss": GptOssConfig(**LOCAL, head_dim=8, rope_parameters=None),
    "minimax m2": MiniMaxM2Config(**LOCAL, head_dim=8),
    "glm 4 moe": Glm4MoeConfig(**ROUTED, head_dim=8, first_k_dense_replace=1),
    "deepseek 2, of groups": DeepseekV2Config(
        **ROUTED | LATENT, **GROUPS, first_k_dense_replace=0, topk_method="group_limited_greedy"
    ),
    "deepseek 3, of groups": DeepseekV3Config(**ROUTED | LATENT, **GROUPS, first_k_dense_replace=0),
    "glm 4 moe, of groups": Glm4MoeConfig(**ROUTED, **GROUPS, head_dim=8, first_k_dense_replace=0),
    "dots 1, of groups": Dots1Config(
        **ROUTED, **GROUPS, head_dim=8, n_shared_experts=1, first_k_dense_replace=0
    ),
    "solar open, of groups": SolarOpenConfig(**ROUTED, **GROUPS, head_dim=8, first_k_dense_replace=0),
}  # fmt: skip
LENGTHS = (9, 6, 6, 4)


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    model.set_experts_implementation("batched_mm")  # the grouped float32 product does not compile here
    for name, parameter in model.named_parameters():
        if "gate" in name or "router" in name:
            torch.nn.init.normal_(parameter.data, std=0.5)  # so that choices differ between tokens
    attention.choose(model, attention.NAME)
    return model


def replaying(model: PreTrainedModel, num_layers: int = 2) -> tuple[PreparedModel, RouterReplay]:
    prepared, replay = PreparedModel(model), RouterReplay.of(model, (num_layers, NUM_CHOSEN))
    assert replay is not None
    prepared.replay = replay
    return prepared, replay


def num_layers(config: PreTrainedConfig) -> int:
    return 2 - (getattr(config, "first_k_dense_replace", None) or 0)


def samples(experts: Tensor | None = None, *, num: int = len(LENGTHS)) -> list[Sample]:
    """Return samples with these `experts` [S, T, L, K]; the first two share a prompt."""
    chance, made = torch.Generator().manual_seed(1), list[Sample]()
    for number, length in enumerate(LENGTHS[:num]):
        ids = tuple(torch.randint(3, 97, (length,), generator=chance).tolist())
        prompt = made[0].prompt_token_ids if number == 1 else ids[:3]
        zeros = (0.0,) * (length - 3)
        rows = b"" if experts is None else experts[number, : length - 1].numpy().astype("<i2").tobytes()
        made.append(
            Sample(
                prompt_token_ids=prompt,
                token_ids=ids[3:],
                sampled_logprobs=zeros,
                advantages=zeros,
                weight=1.0,
                experts=rows,
            )
        )
    return made


def chosen(config: PreTrainedConfig) -> Tensor:
    """Return experts for samples of equal shape, the same for a shared prompt: [S, T, L, K]."""
    chance = torch.Generator().manual_seed(3)
    scores = torch.rand(len(LENGTHS), max(LENGTHS), num_layers(config), NUM_EXPERTS, generator=chance)
    experts = scores.topk(NUM_CHOSEN, dim=-1).indices
    experts[1, :3] = experts[0, :3]
    return experts


def pack_of(made: list[Sample], *, share_prompts: bool = False) -> MicroBatch:
    (pack,) = packs(made, max_tokens=1000, device=CPU, share_prompts=share_prompts)
    return pack


def computed(prepared: PreparedModel, pack: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    prepared.model.zero_grad()
    logprobs_N, _ = prepared.logprobs(pack, 1.0)
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N)).add(0.3)).sum().backward()
    named = prepared.model.named_parameters()
    return logprobs_N.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def without_groups(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the same model with routers that choose among all experts; groups do not change its weights."""
    plain = copy.deepcopy(config)
    for name, value in ONE_GROUP.items():
        if hasattr(plain, name):
            setattr(plain, name, value)
    return plain


def in_words(config: PreTrainedConfig, sample: Sample, experts: Tensor) -> Tensor:
    """Return the log-probabilities of one sample, with the routers' choice replaced in every call of topk: [N]."""
    model, real, calls = model_of(without_groups(config)), torch.topk, list[int]()
    given = experts[: sample.num_tokens]

    def topk(scores: Tensor, k: int, *args: Any, **options: Any) -> Any:
        result = real(scores, k, *args, **options)
        if scores.dim() != 2 or scores.shape[1] != NUM_EXPERTS:
            return result
        indices = result[1].clone()
        indices[:-1] = given[: len(indices) - 1, len(calls)]
        calls.append(1)
        return scores.gather(1, indices), indices

    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "topk", topk)
        patch.setattr(Tensor, "topk", topk)
        logits: Tensor = model(ids, use_cache=False).logits[0].float()
    first = len(sample.prompt_token_ids)
    targets = ids[0, first:].unsqueeze(1)
    return logits[first - 1 : -1].log_softmax(-1).gather(1, targets).squeeze(1)


GROUPED = [name for name in FAMILIES if name.endswith("of groups")]


def weight_of_given(gate: Any, config: Any, hidden_TH: Tensor, given_TK: Tensor) -> Tensor:
    """Return the weights of the given experts by the formula in the family's paper: [T, K]."""
    logits_TE: Tensor = hidden_TH @ gate.weight.T
    if config.model_type == "deepseek_v2":
        weights_TK = logits_TE.softmax(1).gather(1, given_TK)
    else:
        weights_TK = logits_TE.sigmoid().gather(1, given_TK)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True) if config.norm_topk_prob else weights_TK
    scaled_TK: Tensor = weights_TK * config.routed_scaling_factor
    return scaled_TK


@pytest.mark.parametrize("family", GROUPED)
def test_experts_of_unchosen_groups_weigh_as_in_the_paper(family: str) -> None:
    config = copy.deepcopy(FAMILIES[family])
    config.topk_group = config.num_hidden_layers = 1
    model, taken = model_of(config), list[tuple[Tensor, Tensor, Tensor]]()
    _, replay = replaying(model, 1)
    block = model.get_decoder().layers[0].mlp
    replay.watched(lambda: model(torch.arange(12).unsqueeze(0), use_cache=False))
    size = NUM_EXPERTS // config.n_group
    other_groups_T1 = (block.own_TK[:, :1] // size + 1) % config.n_group
    given_TK = other_groups_T1 * size + torch.arange(size)
    block.experts.register_forward_pre_hook(lambda _, inputs: taken.append(inputs))
    replay.choose(given_TK, 12)
    model(torch.arange(12).unsqueeze(0), use_cache=False)
    ((hidden_TH, experts_TK, weights_TK),) = taken
    assert experts_TK.equal(given_TK)
    torch.testing.assert_close(weights_TK, weight_of_given(block.gate, config, hidden_TH, given_TK))
    assert replay.rerouted().tolist() == [12, 12], "each choice differs from the router's own"


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_given_experts_are_used(family: str, share_prompts: bool) -> None:
    """Compare packs with separate sequences under a replaced torch.topk."""
    config = FAMILIES[family]
    experts, (prepared, replay) = chosen(config), replaying(model_of(config), num_layers(config))
    made = samples(experts)
    pack = pack_of(made, share_prompts=share_prompts)
    logprobs_N, gradients = computed(prepared, pack)
    numbers = {sample.token_ids: number for number, sample in enumerate(made)}
    expected = {sample.token_ids: in_words(config, sample, experts[numbers[sample.token_ids]]) for sample in made}
    targets = pack.targets_N.split(pack.sequences_N.bincount().tolist())
    ours = logprobs_N.split(pack.sequences_N.bincount().tolist())
    for tokens, own in zip(targets, ours, strict=True):
        assert torch.allclose(own, expected[tuple(tokens.tolist())], atol=1e-5)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    rerouted, known = replay.rerouted().tolist()
    assert known == num_layers(config) * (len(pack.tokens_T) - len(made))
    assert 0 < rerouted < known
    assert replay.rerouted().tolist() == [0, 0]
    tokens_LE = replay.expert_tokens()
    assert tokens_LE.shape == (num_layers(config), NUM_EXPERTS)
    assert tokens_LE.sum() == NUM_CHOSEN * known
    assert not replay.expert_tokens().any()


def test_unknown_experts_change_nothing() -> None:
    model, pack = model_of(FAMILIES["qwen 3 moe"]), pack_of(samples())
    plain_N, plain = computed(PreparedModel(model), pack)
    prepared, replay = replaying(model)
    same_N, same = computed(prepared, pack)
    assert same_N.equal(plain_N)
    assert all(same[name].equal(gradient) for name, gradient in plain.items())
    assert replay.rerouted().tolist() == [0, 0]


def test_balance_reports_the_busiest_expert_and_dead_experts() -> None:
    tokens_LE = torch.tensor([[4.0, 0, 2, 2], [1, 1, 1, 5]])
    assert routing.balance(tokens_LE) == {"max_vio": 1.25, "dead_experts": 0.125}
    assert routing.balance(tokens_LE[:0]) == {"max_vio": None, "dead_experts": None}


def test_samples_with_and_without_experts_can_share_a_pack() -> None:
    config = FAMILIES["mixtral"]
    experts, model = chosen(config), model_of(config)
    with_experts, without = samples(experts), samples()
    plain_N, _ = computed(PreparedModel(model), pack_of(without[2:3]))
    prepared, _ = replaying(model)
    pack = pack_of([with_experts[0], without[2]])
    logprobs_N, _ = computed(prepared, pack)
    assert torch.allclose(logprobs_N[pack.sequences_N == 1], plain_N, atol=1e-6)
    assert not torch.allclose(logprobs_N[pack.sequences_N == 0], computed(prepared, pack_of(without[:1]))[0], atol=1e-4)


@pytest.mark.parametrize("family", ["qwen 3 moe", "dots 1, of groups"])
@pytest.mark.parametrize("how", ["called again", "compiled", "compiled and recomputed"])
def test_given_experts_are_used_in_the_backward_pass(how: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES[family]
    pack = pack_of(samples(chosen(config)))
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(layers, "COMPILER", "aot_eager")
    with kernel_on_the_cpu():
        plain, own = replaying(model_of(config))
        expected_N, expected = computed(plain, pack)
        prepared, replay = replaying(model_of(config))
        torch._dynamo.utils.counters.clear()
        if how == "called again":
            layers.call_again(prepared.model)
        else:
            layers.compile_layers(prepared.model, recomputed=how != "compiled")
        for _ in range(2):
            logprobs_N, gradients = computed(prepared, pack)
        computed(prepared, pack_of(samples(chosen(config), num=2)))
    assert torch.allclose(logprobs_N, expected_N, atol=1e-5)
    assert all(torch.allclose(gradients[name], gradient, atol=1e-5) for name, gradient in expected.items())
    assert not sum(torch._dynamo.utils.counters["graph_break"].values())
    rerouted, known = replay.rerouted().tolist()
    assert rerouted / known == pytest.approx(np.divide(*own.rerouted().tolist()), abs=0.05)


def test_layers_with_given_experts_share_their_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    model = model_of(Qwen3MoeConfig(**EXPERTS | {"num_hidden_layers": 3}, head_dim=8))
    _, replay = replaying(model, 3)
    layers.compile_layers(model)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for num_tokens in (9, 12):
            replay.choose(torch.zeros(num_tokens, 3, NUM_CHOSEN, dtype=torch.int16), num_tokens)
            model.get_decoder()(input_ids=torch.arange(num_tokens).unsqueeze(0), use_cache=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "a function": lambda scores: torch.topk(scores, NUM_CHOSEN),
    "a method": lambda scores: scores.topk(NUM_CHOSEN, dim=-1),
    "places": lambda scores: torch.topk(scores, NUM_CHOSEN, 1, True, False),
    "names": lambda scores: torch.topk(input=scores, k=NUM_CHOSEN, dim=1, sorted=False),
}
"""Ways to call topk in a router."""


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_replay_intercepts_topk_however_it_is_called(way: str, compiles: bool) -> None:
    def both(scores: Tensor) -> tuple[Any, Any]:
        with routing.Replay(block):
            of_experts = WAYS[way](scores)
            of_tokens = torch.topk(scores, NUM_CHOSEN, dim=0)
        return of_experts, of_tokens

    given = torch.tensor([[0, 5], [3, 1], [2, 4], [5, 3]], dtype=torch.int16)
    none = {"num_rerouted": torch.zeros(2, dtype=torch.int64), "tokens_E": torch.zeros(NUM_EXPERTS, dtype=torch.int64)}
    block = SimpleNamespace(num_choices=NUM_EXPERTS, chosen_TK=given, **none)
    scores = torch.rand(4, NUM_EXPERTS, generator=torch.Generator().manual_seed(5))
    run = torch.compile(both, backend="eager", fullgraph=True) if compiles else both
    with torch.no_grad():
        choice, of_tokens = run(scores)
    assert choice[0].equal(choice.values)
    assert choice.indices.equal(given.long())
    assert choice.values.equal(scores.gather(1, given.long()))
    assert of_tokens.indices.equal(scores.topk(NUM_CHOSEN, dim=0).indices), "no choice among experts"


def test_router_reading_topk_fields_uses_given_experts() -> None:
    latent = {"q_lora_rank": 16, "head_dim": 16, "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 8}
    kinds = {"mlp_layer_types": ["moe", "moe"], "layer_types": ["sliding_attention", "sliding_attention"]}
    config = DeepseekV4Config(**ROUTED | latent | kinds | {"num_key_value_heads": 1})
    replaying(model_of(config))
    config.mlp_layer_types = ["hash_moe", "moe"]
    model = model_of(config)
    with pytest.raises(UnsupportedModelError, match=r"chooses \[2\] experts per token in 1 of 2 layers with experts"):
        RouterReplay.of(model)
    assert "forward" not in vars(model.get_decoder().layers[1].mlp)


def test_router_with_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FAMILIES["mixtral"])
    monkeypatch.setattr(model, "get_decoder", lambda: model)  # as in Llama 4, it returns no hidden states
    with pytest.raises(UnsupportedModelError, match="cannot be called like other language models: AttributeError"):
        RouterReplay.of(model)


def test_failed_replay_trial_restores_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out, and the caller retries."""

    def too_large(_: PreTrainedModel) -> Tensor:
        raise torch.OutOfMemoryError("made up")

    model = model_of(FAMILIES["mixtral"])
    monkeypatch.setattr(routing, "_hidden", too_large)
    with pytest.raises(torch.OutOfMemoryError):
        RouterReplay.of(model)
    assert all("forward" not in vars(layer.mlp) for layer in model.get_decoder().layers)


def test_replay_check_turns_dropout_off() -> None:
    model = model_of(FAMILIES["mixtral"])
    lora = TrainConfig.of(model_name="m", mode="lora_only", lora_r=4, lora_dropout=0.5).lora
    adapter = Adapter(model, lora, seed=0, base_name="base")
    with torch.no_grad():
        for matrices in adapter.modules.values():
            matrices.lora_b.fill_(0.1)
    before = torch.get_rng_state()
    replaying(model)
    assert torch.get_rng_state().equal(before), "dropout's masks are those of a run without replay"
    assert any(module.training for module in model.modules())


def sliced(ranks: Ranks) -> tuple[float, float, float]:
    """Return how far log-probabilities are from those of a full pack, and the share of rerouted tokens in both."""
    config = FAMILIES["mixtral"]
    pack, (prepared, replay) = pack_of(samples(chosen(config)), share_prompts=True), replaying(model_of(config))
    whole_N, _ = computed(prepared, pack)
    rerouted, known = replay.rerouted().tolist()
    prepared.slices = slices.cut(prepared.model, ranks.cp_group)
    own_N, _ = computed(prepared, pack)
    figures = Computed.nothing(CPU, 0).figures(Batch(), ranks, 0.0, [], prepared)
    return float((own_N - whole_N).abs().max()), figures["rerouted_share"], rerouted / known


def test_each_slice_uses_the_experts_of_its_tokens() -> None:
    for difference, rerouted_share, expected_share in on_ranks(2, sliced, cp_size=2, limit_s=110):
        assert difference < 1e-4
        assert rerouted_share == pytest.approx(expected_share)


def test_layers_with_different_numbers_of_experts_are_refused() -> None:
    model, (config, wider) = model_of(FAMILIES["mixtral"]), (FAMILIES["mixtral"], MixtralConfig(**LOCAL))
    wider.num_local_experts = NUM_EXPERTS + 2
    model.get_decoder().layers[1] = model_of(wider).get_decoder().layers[1]
    pack = pack_of(samples(chosen(config)))
    prepared = PreparedModel(model)
    before_N, _ = prepared.logprobs(pack, 1.0)
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM has .* per layer \(\[6, 8\]\)") as caught:
        RouterReplay.of(model, (2, NUM_CHOSEN))
    assert caught.value.hint == "--no-router-replay"
    assert RouterReplay.if_known(model) is None
    assert prepared.logprobs(pack, 1.0)[0].equal(before_N), "its own routers choose"


def test_unsupported_routers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="in 0 of 0 layers with experts, and the server 2 in 2"):
        RouterReplay.of(model_of(LlamaConfig(**SIZES)), (2, 2))
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM chooses \[2\] experts per token in 2 of 2"):
        RouterReplay.of(model_of(FAMILIES["mixtral"]), (2, 4))
    model = model_of(FAMILIES["mixtral"])
    for layer in model.get_decoder().layers:
        layer.mlp.experts.forward = lambda hidden_states, *_: hidden_states
    pack = pack_of(samples(chosen(FAMILIES["mixtral"])))
    prepared = PreparedModel(model)
    before_N, _ = prepared.logprobs(pack, 1.0)
    with pytest.raises(UnsupportedModelError, match="does not compute with the experts"):
        RouterReplay.of(model, (2, NUM_CHOSEN))
    assert prepared.logprobs(pack, 1.0)[0].equal(before_N), "its own routers choose"
