"""A step with images on two ranks, beside a stand-in for vLLM: pixels go only to the rank that trains on them.

Not covered: real vLLMs (`tests/cpu/test_images.py`), packed passes (`tests/unit/passes/test_image_embeddings.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from bridge.config import TrainConfig
from bridge.learn.policy_loss import LossSpec
from bridge.passes.packing import Sample
from bridge.ranks import messages
from bridge.ranks.tensors import Tensors
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts import encoded_prompts
from bridge.run.learner import Learner
from bridge.run.step_batch import Batch
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Group, Problem
from bridge.weights import skeleton
from tests.models import pictures, tiny
from tests.models.families import FAMILIES
from tests.models.processors import END, IMAGE, START
from tests.streams import environment_stream
from tests.unit.http_server import serving
from tests.unit.openai_server import openai
from tests.unit.rollouts.test_encoded_prompts import Processor
from tests.unit.run.test_learner import learner_of
from tests.unit.several_ranks import on_ranks

NUM_RANKS = 2
NUM_GROUPS = 8
SIZES = ((64, 64), (64, 32), (32, 64), (16, 16), (64, 48), (32, 32))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = FAMILIES["Qwen3-VL"]()
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path, tiny.VOCABULARY, (IMAGE, "<|video_pad|>", START, END))
    processor = Processor(AutoTokenizer.from_pretrained(tmp_path))
    monkeypatch.setattr(encoded_prompts, "AutoProcessor", SimpleNamespace(from_pretrained=lambda _, **__: processor))
    for number in range(NUM_GROUPS):
        Image.effect_noise(SIZES[number % len(SIZES)], 90).convert("RGB").save(tmp_path / f"{number}.png")
    return tmp_path


class Pictures:
    """One problem per image, and a second one for the last image; the reward depends on the first letter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Problem]:
        for number in (*range(NUM_GROUPS - 1), NUM_GROUPS - 2):
            yield {"prompt": f"{START}{IMAGE}{END}", "images": [str(self._folder / f"{number}.png")]}

    def score(self, _: Problem, completion: str) -> float:
        return float(ord(completion[0]) % 7)


def config_of(model: Path) -> TrainConfig:
    sizes = {"batch_size": 2 * NUM_GROUPS, "group_size": 2, "max_new_tokens": 8}
    return TrainConfig.of(model_name=str(model), seed=0, **sizes)


def taken(ranks: Ranks, model: Path, url: str) -> list[Group]:
    with closing(environment_stream(config_of(model), Pictures(model), ranks=ranks)) as stream:
        stream.served(Endpoint(url=url), 1)
        return stream.take(NUM_GROUPS, step=1)


def made(model: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model)
    config.get_text_config().initializer_range = config.initializer_range = 0.06
    whole: PreTrainedModel = skeleton.auto_class(config).from_config(config, dtype=torch.float32).eval()
    whole.requires_grad_(False)
    whole.get_decoder().requires_grad_(True)
    return whole


def trained(ranks: Ranks, model: Path, groups: Sequence[Group]) -> tuple[Learner, dict[str, Any], dict[str, Tensor]]:
    whole = made(model)
    trained_names = {name: 1.0 for name, parameter in whole.named_parameters() if parameter.requires_grad}
    learner = learner_of(whole, ranks=ranks, lr_factors=trained_names)
    learner.take(groups)
    learner.prepare()
    learner.write()
    return learner, learner.learnt(), {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}


def a_step(ranks: Ranks, model: Path, url: str) -> dict[str, Any]:
    """Sample and train on one rank, and count the bytes that it sends: in messages, and to each rank."""
    objects, pixels = list[int](), [0] * NUM_RANKS
    exchange, all_to_all = messages.exchange, Tensors.all_to_all

    def counted_exchange(mine: bytes, *given: Any) -> list[bytes]:
        objects.append(len(mine))
        return exchange(mine, *given)

    def counted_all_to_all(self: Tensors, sent: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
        for number, content in enumerate(sent):
            pixels[number] += len(content)
        return all_to_all(self, sent, lengths)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(messages, "exchange", counted_exchange))
        patches.enter_context(mock.patch.object(Tensors, "all_to_all", counted_all_to_all))
        groups = taken(ranks, model, url)
        learner, learnt, weights = trained(ranks, model, groups)
    (own,) = learner._batch.mini_batches
    return {
        "learnt": learnt,
        "weights": weights,
        "objects": sum(objects),
        "pixels": pixels,
        "sampled": {group.images.digest for group in groups if group.images and group.images.is_here},
        "trained": {sample.images.digest for sample in own if sample.images and sample.images.is_here},
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_pixels_are_sent_only_to_the_rank_that_needs_them(model: Path) -> None:
    with serving(openai(is_bridge=True)) as server:
        ranks = on_ranks(NUM_RANKS, a_step, model, server.url)
        whole = taken(ALONE, model, server.url)
    sizes = {
        group.images.digest: sum(len(array.content) for array in group.images.arrays) for group in whole if group.images
    }
    assert len(sizes) == NUM_GROUPS - 1, "two groups have one image"
    for rank, mine in enumerate(ranks):
        theirs = ranks[1 - rank]
        sent = [0] * NUM_RANKS
        sent[1 - rank] = sum(sizes[digest] for digest in theirs["trained"] - theirs["sampled"])
        assert mine["pixels"] == sent
        assert mine["objects"] < max(sizes.values()) / 4, "messages must not carry pixels"
    assert ranks[0]["trained"] | ranks[1]["trained"] == sizes.keys()
    assert 0 < sum(sum(mine["pixels"]) for mine in ranks) < sum(sizes.values())


def test_ranks_learn_the_same_from_received_images(model: Path) -> None:
    with serving(openai(is_bridge=True)) as server:
        ranks = on_ranks(NUM_RANKS, a_step, model, server.url)
        whole = taken(ALONE, model, server.url)
    having_all, _ = on_ranks(NUM_RANKS, weights_of, model, whole)
    assert all(same(one["weights"], having_all) for one in ranks)
    _, alone, weights = trained(ALONE, model, whole)
    assert not same(weights, dict(made(model).named_parameters()))
    for name in ("loss", "grad_norm", "entropy", "logprob_diff_mean"):
        assert ranks[0]["learnt"][name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def weights_of(ranks: Ranks, model: Path, groups: Sequence[Group]) -> dict[str, Tensor]:
    return trained(ranks, model, groups)[2]


def test_image_positions_stay_with_each_prompt(model: Path) -> None:
    """Prompts with the same image and different questions have the same digest."""
    config = AutoConfig.from_pretrained(model)
    groups = [group_of(config, *parts) for parts in (((2, 3), 6), (5, (2, 3)), (5, 6, (2, 3)), (5, 6, 7, (2, 3)))]
    starts = {group.prompt_token_ids: group.images.starts for group in groups if group.images}
    assert len({group.images.digest for group in groups if group.images}) == 1
    assert len(starts) == len(groups)
    for samples in on_ranks(NUM_RANKS, own_samples, model, groups):
        assert len(samples) == len(groups), "two completions of half of the groups"
        assert all(sample.images.is_here for sample in samples)
        assert [sample.images.starts for sample in samples] == [starts[sample.prompt_token_ids] for sample in samples]


def group_of(config: PretrainedConfig, *parts: tuple[int, int] | int) -> Group:
    ids, shown = pictures.prompt(config, *parts)
    completions = tuple(
        Completion(token_ids=(token,), logprobs=(0.0,), text="", finish_reason="stop") for token in (8, 9)
    )
    return Group(
        problem={"prompt": ""}, prompt_token_ids=ids, images=shown, completions=completions, rewards=(0.0, 1.0)
    )


def own_samples(ranks: Ranks, model: Path, groups: Sequence[Group]) -> list[Sample]:
    """Return the samples of this rank, which sampled every second group."""
    known = [
        group if number % NUM_RANKS == ranks.rank else messages.loads(messages.dumps(group))
        for number, group in enumerate(groups)
    ]
    config = config_of(model)
    batch = Batch.of(known, LossSpec.of(config.loss), ranks, config.optimizer, longest=8, step=1)
    return [sample for mini_batch in batch.mini_batches for sample in mini_batch]
