"""Images in packed sequences compute the same as in transformers' own model, for each family with tested images.

Not covered: the processor (`tests/unit/rollouts/test_encoded_prompts.py`), vLLM (`tests/cpu/test_images.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bridge.config import ComputeConfig
from bridge.errors import UnsupportedModelError
from bridge.passes import image_embeddings, preparation
from bridge.passes.packing import MicroBatch, Sample, packs
from bridge.passes.prepared_model import PreparedModel
from bridge.planning.model_size import SEEING
from bridge.types import Images
from bridge.weights import skeleton
from tests.models import pictures
from tests.models.families import FAMILIES, INSIDE

CPU = torch.device("cpu")
NAMES = [name for name in sorted(INSIDE) if FAMILIES[name]().model_type in SEEING]
OF_QWEN = SEEING - {"mistral3"}
"""Families with positions in time, rows and columns."""
EQUAL = 1e-4
"""Largest difference of hidden states in float32."""


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.initializer_range = config.get_text_config().initializer_range = 0.06
    made: PreTrainedModel = skeleton.auto_class(config).from_config(config, dtype=torch.float32).eval()
    return made


@pytest.fixture(scope="module", params=NAMES)
def prepared(request: pytest.FixtureRequest) -> PreparedModel:
    made = model_of(request.param)
    made.requires_grad_(False)
    made.get_decoder().requires_grad_(True)
    return preparation.prepare(made, ComputeConfig(compile_layers=False))


@pytest.fixture(scope="module")
def model(prepared: PreparedModel) -> PreTrainedModel:
    return prepared.model


def samples_of(model: PreTrainedModel) -> list[Sample]:
    """Return two completions each of a text prompt and three prompts with images, two of which have equal tokens."""
    prompts: list[tuple[tuple[int, ...], Images | None]] = [
        pictures.prompt(model.config, 5, (2, 3), 6, 7, seed=1),
        pictures.prompt(model.config, 5, (2, 3), 6, 7, seed=2),
        pictures.prompt(model.config, (3, 1), (1, 2), 9, 11, seed=3),
        ((5, 6, 7, 8), None),
    ]
    completions = (20, 21, 22), (23, 24)
    return [
        Sample(
            prompt_token_ids=ids, token_ids=tokens, images=shown, weight=float(4 * number + length),
            sampled_logprobs=(0.0,) * len(tokens), advantages=(1.0,) * len(tokens),
        )
        for number, (ids, shown) in enumerate(prompts)
        for length, tokens in enumerate(completions)
    ]  # fmt: skip


def alone(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Return the hidden states that predict the completion, computed by transformers."""
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    shown: dict[str, Any] = {}
    if sample.images is not None:
        shown = image_embeddings.tensors([sample.images])
        if model.config.model_type in OF_QWEN:
            shown["mm_token_type_ids"] = torch.zeros_like(ids)
            shown["mm_token_type_ids"][0, image_embeddings.image_tokens(sample.images)] = 1
    hidden: torch.Tensor = model.base_model(input_ids=ids, use_cache=False, **shown).last_hidden_state[0]
    return hidden[len(sample.prompt_token_ids) - 1 : -1]


def pack(samples: list[Sample], *, share_prompts: bool = False) -> MicroBatch:
    (batch,) = packs(samples, max_tokens=1000, device=CPU, share_prompts=share_prompts)
    return batch


@pytest.mark.parametrize("share_prompts", [False, True])
@torch.no_grad()
def test_packed_images_match_separate_sequences(prepared: PreparedModel, *, share_prompts: bool) -> None:
    model = prepared.model
    if share_prompts and model.config.model_type not in ("mistral3", "qwen3_vl"):
        pytest.skip("layers with a state share no prompts")
    samples = {sample.weight: sample for sample in samples_of(model)}
    batch = pack([*samples.values()], share_prompts=share_prompts)
    hidden = prepared.own_hidden(batch.tokens_T, batch.positions_T, batch.spans, packed_images=batch.images)
    for number in range(len(samples)):
        is_own = batch.sequences_N == number
        expected = alone(model, samples[float(batch.weights_N[is_own][0])])
        assert (hidden[batch.rows_N[is_own]] - expected).abs().max() < EQUAL


def test_equal_tokens_with_different_images_are_not_shared(model: PreTrainedModel) -> None:
    first, _, second, *_ = samples_of(model)
    assert first.prompt_token_ids == second.prompt_token_ids
    both = 2 * len(first.prompt_token_ids) + len(first.token_ids) + len(second.token_ids)
    assert len(pack([first, second], share_prompts=True).tokens_T) == both
    another = replace(first, token_ids=(30, 31, 32))
    assert len(pack([first, another], share_prompts=True).tokens_T) == both - len(first.prompt_token_ids)


def test_vision_tower_computes_a_shared_image_once(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    model = prepared.model
    original = model.get_image_features

    def counted(*, pixel_values: torch.Tensor, **others: Any) -> Any:
        given.append(pixel_values.numel())
        return original(pixel_values=pixel_values, **others)

    monkeypatch.setattr(model, "get_image_features", counted)
    batch = pack(samples_of(model)[:4])
    prepared.logprobs(batch, 1.0)
    assert batch.images is not None
    in_time = getattr(model.config.vision_config, "temporal_patch_size", 1)
    of_image = 6 * (8 * 8) * 3 * in_time
    expected = [2 * of_image] if model.config.model_type in OF_QWEN else [of_image] * 2
    assert given == expected, "two images of 6 tokens of 8 x 8 pixels, in four sequences; Pixtral's mask is dense"
    assert len(batch.images.indices_I) == 4 * 6


def test_positions_match_transformers(model: PreTrainedModel) -> None:
    if model.config.model_type not in OF_QWEN:
        pytest.skip("its tokens count")
    for sample in samples_of(model)[:6:2]:
        ids = sample.prompt_token_ids + sample.token_ids
        assert sample.images is not None
        kinds = torch.zeros(1, len(ids), dtype=torch.int64)
        kinds[0, image_embeddings.image_tokens(sample.images)] = 1
        grids = image_embeddings.tensors([sample.images])["image_grid_thw"]
        expected, _ = model.base_model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=grids)
        assert image_embeddings.positions(len(ids), sample.images).tolist() == expected[:, 0].tolist()


def test_gradients_reach_the_text_but_not_the_tower(prepared: PreparedModel) -> None:
    model = prepared.model
    logprobs_N, _ = prepared.logprobs(pack(samples_of(model)), 1.0)
    logprobs_N.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert "model.language_model.embed_tokens.weight" in trained
    assert not any("visual" in name or "vision" in name or "projector" in name for name in trained)
    model.zero_grad()


def test_tower_is_not_called_without_images(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared.model, "get_image_features", None)
    batch = pack(samples_of(prepared.model)[-2:])
    assert batch.images is None
    prepared.logprobs(batch, 1.0)


def test_image_check_passes_and_runs_once(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    unproved = PreparedModel(model)
    with monkeypatch.context() as patch:
        patch.setattr(model, "get_image_features", None)
        unproved.prove_images(samples_of(model)[-2:])
        with pytest.raises(UnsupportedModelError):
            unproved.prove_images(samples_of(model))  # samples without images are not checked
    unproved.prove_images(samples_of(model))
    monkeypatch.setattr(model, "get_image_features", None)
    unproved.prove_images(samples_of(model))


@torch.no_grad()
def test_sampled_image_token_is_treated_as_text(prepared: PreparedModel) -> None:
    """A sampled image token has no image, so vLLM uses its word embedding."""
    model = prepared.model
    first, second, *_ = samples_of(model)
    with_token = replace(first, token_ids=(model.config.image_token_id, *first.token_ids[1:]))
    batch = pack([with_token, second])
    assert batch.images is not None
    assert len(batch.images.indices_I) == 2 * 6
    hidden = prepared.own_hidden(batch.tokens_T, batch.positions_T, batch.spans, packed_images=batch.images)
    is_second = batch.sequences_N == 1
    assert (hidden[batch.rows_N[is_second]] - alone(model, second)).abs().max() < EQUAL


def _text_positions(num_tokens: int, _: Images | None, *, original: Any = image_embeddings.positions) -> Any:
    return original(num_tokens, None)


def _other_order(model: PreTrainedModel, several: list[Images], *, original: Any = image_embeddings.features) -> Any:
    return original(model, several[::-1])


def _without_deepstack(*args: Any, original: Any = image_embeddings.inputs) -> Any:
    taken = original(*args)
    return {name: value for name, value in taken.items() if name in ("inputs_embeds", "position_ids")}


FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "positions": ("positions", _text_positions, "the positions of tokens differ"),
    "order": ("features", _other_order, "embeddings differ by"),
    "deepstack": ("inputs", _without_deepstack, "its decoder gets deepstack_visual_embeds"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_image_check_refuses_models_with_faults(
    fault: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "deepstack" and model.config.model_type != "qwen3_vl":
        pytest.skip("its tower has none")
    if fault == "positions" and model.config.model_type not in OF_QWEN:
        pytest.skip("its tokens count")
    name, replacement, words = FAULTS[fault]
    monkeypatch.setattr(image_embeddings, name, replacement)
    unproved = PreparedModel(model)
    for _ in range(2):  # a refusal is not remembered as a passed check
        with pytest.raises(UnsupportedModelError, match=words):
            unproved.prove_images(samples_of(model)[:4])


def test_out_of_memory_in_the_image_check_is_not_a_refusal(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer retries with less memory."""

    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(image_embeddings, "features", too_large)
    unproved = PreparedModel(model)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            unproved.prove_images(samples_of(model))


def test_image_check_refuses_an_unsupported_signature() -> None:
    """Mistral 3 gets grids in Qwen's format."""
    made = model_of("Mistral 3")
    of_another = FAMILIES["Qwen3-VL"]()
    ids, shown = pictures.prompt(of_another, 5, (2, 2), 6)
    zero = (0.0,)
    sample = Sample(
        prompt_token_ids=ids, token_ids=(7,), images=shown, sampled_logprobs=zero, advantages=zero, weight=1.0
    )
    with pytest.raises(UnsupportedModelError, match="Mistral3ForConditionalGeneration treats images differently"):
        PreparedModel(made).prove_images([sample])
