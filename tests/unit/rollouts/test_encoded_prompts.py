"""Prompts with images become token ids and tensors once; mismatches are refused in one line.

The processor is a stand-in for Qwen3-VL's, which needs torchvision: it reads and expands in the same way.
"""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Gemma3Config, PreTrainedTokenizerBase

from bridge.agents.trajectories import as_chat
from bridge.config import SamplingConfig, TrainConfig
from bridge.core.concurrency import gather_or_cancel
from bridge.errors import BridgeError, RewardError, UnsupportedModelError, UsageError
from bridge.ranks import messages
from bridge.rollouts import encoded_prompts, openai_api, problems
from bridge.rollouts.encoded_prompts import Prompts
from bridge.rollouts.groups import Completions
from bridge.rollouts.sampler import Sampler
from bridge.server.endpoint import Endpoint
from bridge.server.protocol import CompletionsRequest
from bridge.types import Completion, Group, Images, Problem
from tests.models import tiny
from tests.models.families import FAMILIES
from tests.models.processors import END, FIRST_TOKEN, IMAGE, START
from tests.streams import environment_stream
from tests.unit.http_server import serving
from tests.unit.openai_server import openai

MARKER = f"{START}{IMAGE}{END}"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}{MARKER}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}};{{% endfor %}}"
)
PATCH = 4
IN_TIME = 2


class Processor:
    """Patches of 4 x 4 pixels and 2 frames; a token is 2 x 2 patches."""

    image_token = IMAGE
    chat_template: str | dict[str, str] | None = None
    expands_twice = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *, text: list[str], images: list[Any], return_tensors: str, **_: object) -> dict[str, Any]:
        del return_tensors
        (prompt,) = text
        grids, pixels = [], []
        for image in images:
            if image.width > 64:
                raise ValueError("absolute aspect ratio must be smaller than 200")
            grids.append([1, image.height // PATCH, image.width // PATCH])
            patches = np.asarray(image, dtype=np.float32).reshape(-1, PATCH * PATCH * 3) / 255
            pixels.append(np.tile(patches, (1, IN_TIME)))
            count = grids[-1][1] * grids[-1][2] // 4 * (2 if self.expands_twice else 1)
            prompt = prompt.replace(IMAGE, "@" * count, 1)
        ids = self._tokenizer(prompt.replace("@", IMAGE), return_tensors="pt")["input_ids"]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.from_numpy(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor(grids),
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = FAMILIES["Qwen3-VL"]()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tiny.write_tokenizer(folder, tiny.VOCABULARY, (IMAGE, "<|video_pad|>", START, END))
    return folder


@pytest.fixture
def processor(model: Path, monkeypatch: pytest.MonkeyPatch) -> Processor:
    made = Processor(AutoTokenizer.from_pretrained(model))
    monkeypatch.setattr(encoded_prompts, "AutoProcessor", SimpleNamespace(from_pretrained=lambda _, **__: made))
    return made


def file(folder: Path, name: str, size: tuple[int, int] = (16, 8)) -> str:
    Image.new("RGB", size, (250, 10, 20)).save(folder / name)
    return str(folder / name)


def encode(model: Path, prompt: Any, *paths: str, **choices: Any) -> encoded_prompts.Encoded:
    problem: Any = {"prompt": prompt, "images": [*paths]}
    return Prompts(str(model), AutoTokenizer.from_pretrained(model), {}, **choices).encode(problem)


def refusal(model: Path, prompt: Any, *paths: str, **choices: Any) -> BridgeError:
    with pytest.raises(BridgeError) as caught:
        encode(model, prompt, *paths, **choices)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.usefixtures("processor")
def test_image_tokens_are_expanded_once(model: Path, tmp_path: Path) -> None:
    ids, shown = encode(model, f"a{MARKER}b{MARKER}", file(tmp_path, "a.png"), file(tmp_path, "b.png", (8, 8)))
    assert shown is not None
    assert (shown.starts, shown.grids) == ((2, 7), ((1, 1, 2), (1, 1, 1)))
    assert [index for index, token in enumerate(ids) if token == FIRST_TOKEN] == [2, 3, 7]
    arrays = {array.name: array for array in shown.arrays}
    assert (arrays["pixel_values"].dtype, arrays["pixel_values"].shape) == ("bfloat16", (12, 96))
    assert (arrays["image_grid_thw"].dtype, arrays["image_grid_thw"].shape) == ("int64", (2, 3))


class OfPixtral(Processor):
    """Tokens of 8 x 8 pixels. A separate token ends each row, another one the image; images are padded to one size."""

    image_break_token, image_end_token = START, END

    def __call__(self, *, text: list[str], images: list[Any], return_tensors: str, **_: object) -> dict[str, Any]:
        del return_tensors
        (prompt,) = text
        largest = max(image.height for image in images), max(image.width for image in images)
        for image in images:
            rows = ("@" * (image.width // 8) + START) * (image.height // 8)
            prompt = prompt.replace(IMAGE, rows.removesuffix(START) + END, 1)
        ids = self._tokenizer(prompt.replace("@", IMAGE), return_tensors="pt")["input_ids"]
        sizes = torch.tensor([[image.height, image.width] for image in images])
        return {"input_ids": ids, "pixel_values": torch.zeros(len(images), 3, *largest), "image_sizes": sizes}


def test_each_image_row_is_a_run_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["Mistral 3"]().save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path, tiny.VOCABULARY, (IMAGE, "<|video_pad|>", START, END))
    made = OfPixtral(AutoTokenizer.from_pretrained(tmp_path))
    monkeypatch.setattr(encoded_prompts, "AutoProcessor", SimpleNamespace(from_pretrained=lambda _, **__: made))
    paths = file(tmp_path, "a.png", (24, 16)), file(tmp_path, "b.png", (8, 8))
    ids, shown = encode(tmp_path, f"a{IMAGE}b{IMAGE}", *paths)
    assert shown is not None
    assert (shown.starts, shown.grids) == ((1, 5, 10), ((1, 1, 3), (1, 1, 3), (1, 1, 1)))
    assert [ids[start - 1 : start + 3].count(FIRST_TOKEN) for start in shown.starts] == [3, 3, 1]
    for token, meaning in ((START, "the end of a row of an image"), (END, "the end of an image")):
        written = refusal(tmp_path, f"What does {token} mean? {IMAGE}", paths[0])
        assert isinstance(written, RewardError)
        assert f"has {token}, which stands for {meaning}" in written.message
        assert f"remove {token} from the text" in written.hint


@pytest.mark.usefixtures("processor")
def test_prompt_without_images_is_encoded_as_text(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    problem: Problem = {"prompt": "ab", "images": []}
    encoded = asyncio.run(Prompts(str(model), tokenizer, {}).encode_beside(problem))
    assert encoded == (problems.encode(tokenizer, problem), None)


def test_images_come_first_or_at_their_marker(model: Path, tmp_path: Path, processor: Processor) -> None:
    processor.chat_template = TEMPLATE
    path, tokenizer = file(tmp_path, "a.png"), AutoTokenizer.from_pretrained(model)
    system = {"role": "system", "content": "s"}
    first, _ = encode(model, [system, {"role": "user", "content": "q"}], path)
    parts = [{"type": "text", "text": "q"}, {"type": "image"}]
    inside, _ = encode(model, [system, {"role": "user", "content": parts}], path)
    expanded = f"{START}{IMAGE}{IMAGE}{END}"
    assert [tokenizer.decode(ids) for ids in (first, inside)] == [
        f"system:s;user:{expanded}q;",
        f"system:s;user:q{expanded};",
    ]


def test_image_marker_in_text_sets_the_position(model: Path, tmp_path: Path, processor: Processor) -> None:
    """verl, ms-swift and LLaMA-Factory write <image> into the text of a message."""
    processor.chat_template = TEMPLATE
    paths, tokenizer = [file(tmp_path, name) for name in ("a.png", "b.png")], AutoTokenizer.from_pretrained(model)
    expanded = f"{START}{IMAGE}{IMAGE}{END}"
    system, turn = {"role": "system", "content": "s"}, {"role": "assistant", "content": "t"}
    for prompt, text in (
        ([system, {"role": "user", "content": "<image>q"}], f"system:s;user:{expanded}q;"),
        ([{"role": "user", "content": "q<image> r"}], f"user:q{expanded} r;"),
    ):
        assert tokenizer.decode(encode(model, prompt, paths[0])[0]) == text
    two: Any = [{"role": "user", "content": "<image>q"}, turn, {"role": "user", "content": "r <image>"}]
    text = f"user:{expanded}q;assistant:t;user:r {expanded};"
    assert tokenizer.decode(encode(model, two, *paths)[0]) == text
    fewer = refusal(model, two, paths[0])
    assert "has 2 places <image>, expected 1, for " in fewer.message
    parts: Any = [{"type": "text", "text": "what is <image> in HTML?"}, {"type": "image"}]
    inside, _ = encode(model, [{"role": "user", "content": parts}], paths[0])
    assert tokenizer.decode(inside) == f"user:what is <image> in HTML?{expanded};"


def test_default_of_named_templates_renders_images(model: Path, tmp_path: Path, processor: Processor) -> None:
    processor.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    prompt, _ = encode(model, [{"role": "user", "content": "q"}], file(tmp_path, "a.png"))
    assert AutoTokenizer.from_pretrained(model).decode(prompt) == f"user:{START}{IMAGE}{IMAGE}{END}q;"


def test_turn_without_content_is_allowed_with_images(model: Path, tmp_path: Path, processor: Processor) -> None:
    processor.chat_template = TEMPLATE
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turn: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt, _ = encode(
        model, [{"role": "user", "content": "q"}, turn, {"role": "user", "content": "r"}], file(tmp_path, "a.png")
    )
    assert AutoTokenizer.from_pretrained(model).decode(prompt).endswith("q;assistant:;user:r;")


def test_misfitting_image_inputs_are_refused(model: Path, tmp_path: Path, processor: Processor) -> None:
    path = file(tmp_path, "a.png")
    none = refusal(model, "what?", path)
    assert "has 0 places for images, expected 1, for " in none.message
    assert "has 2 places for images, expected 1" in refusal(model, MARKER * 2, path).message
    assert "no chat template" in refusal(model, [{"role": "user", "content": "q"}], path).message
    Image.effect_noise((64, 64), 90).save(tmp_path / "broken.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "broken.png").read_bytes()[:500])
    broken = refusal(model, MARKER, str(tmp_path / "broken.png"))
    assert isinstance(broken, RewardError)
    assert "broken.png cannot be read: " in broken.message
    assert "rejects" in refusal(model, MARKER, file(tmp_path, "wide.png", (128, 8))).message
    processor.chat_template = "{{ raise_exception('no') }}"
    assert "chat template rejects" in refusal(model, [{"role": "user", "content": "q"}], path).message
    adjacent = refusal(model, IMAGE * 2, path, path)
    assert "wrote 4 image tokens, expected 2, 2" in adjacent.message
    assert "separate images with text" in adjacent.hint
    processor.expands_twice = True
    twice = refusal(model, MARKER, path)
    assert isinstance(twice, UnsupportedModelError)
    assert "wrote 4 image tokens, expected 2" in twice.message


def test_models_without_image_support_are_refused_by_name(tmp_path: Path) -> None:
    path = file(tmp_path, "a.png")
    for config, words in ((tiny.llama(), "is a llama, which has no vision model"), (Gemma3Config(), "on text only")):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        tiny.write_tokenizer(folder, tiny.VOCABULARY)
        refused = refusal(folder, MARKER, path)
        assert isinstance(refused, UnsupportedModelError)
        assert words in refused.message


def test_images_need_a_processor_and_unsliced_passes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path, "a.png")
    assert "--tensor-parallel-size" in refusal(model, MARKER, path, pass_size=2).hint

    def missing(_: str, **__: object) -> None:
        raise ImportError("\nQwen3VLVideoProcessor requires the Torchvision library\nbut it was not found")

    monkeypatch.setattr(encoded_prompts, "AutoProcessor", SimpleNamespace(from_pretrained=missing))
    refused = refusal(model, MARKER, path)
    assert isinstance(refused, UsageError)
    assert "requires the Torchvision library" in refused.message
    assert "pip install torchvision pillow" in refused.hint


@pytest.mark.usefixtures("processor")
def test_pixels_are_sent_to_the_server_but_not_to_ranks(model: Path, tmp_path: Path) -> None:
    ids, shown = encode(model, f"a{MARKER}", file(tmp_path, "a.png"))
    assert shown is not None
    body = {"model": "m", "prompt": ids, "n": 1, "max_tokens": 1, "temperature": 1.0, "images": openai_api.sent(shown)}
    request = CompletionsRequest.model_validate_json(json.dumps(body))
    assert {name: (dtype, shape, content) for name, (dtype, shape, content) in request.images.items()} == {
        array.name: (array.dtype, array.shape, array.content) for array in shown.arrays
    }
    assert base64.b64decode(openai_api.sent(shown)["pixel_values"][2]) == shown.arrays[1].content
    group = Group(problem={"prompt": "p"}, prompt_token_ids=ids, images=shown, completions=(), rewards=())
    arrived = messages.loads(messages.dumps(group))
    assert not arrived.images.is_here
    assert arrived == replace(group, images=replace(shown, arrays=tuple(replace(a, content=b"") for a in shown.arrays)))


@pytest.mark.usefixtures("processor")
def test_different_images_have_different_digests(model: Path, tmp_path: Path) -> None:
    _, one = encode(model, MARKER, file(tmp_path, "a.png"))
    Image.new("RGB", (16, 8), (0, 0, 0)).save(tmp_path / "b.png")
    _, other = encode(model, MARKER, str(tmp_path / "b.png"))
    assert one is not None
    assert other is not None
    assert (one.starts, one.grids) == (other.starts, other.grids)
    assert one.digest != other.digest


def test_pixels_in_memory_are_limited_by_concurrency() -> None:
    """An evaluation starts all of its problems at once."""
    held = most_held = 0
    shown = Images.of((), starts=(), grids=())

    class Counted(Prompts):
        async def encode_beside(self, problem: Problem) -> encoded_prompts.Encoded:
            nonlocal held, most_held
            held += 1
            most_held = max(most_held, held)
            await asyncio.sleep(0)
            return encoded_prompts.Encoded((1,), shown)

    class Slow(Sampler):
        async def one(self, *_: Any, **__: Any) -> tuple[Completion, ...]:
            nonlocal held
            await asyncio.sleep(0)
            held -= 1
            return ()

    class Silent:
        async def score(self, *_: object) -> list[Any]:
            return []

    with Slow(SamplingConfig(max_concurrency=3)) as sampler:
        groups = Completions(Counted("", None, {}), sampler, Silent())  # type: ignore[arg-type]
        problem: Problem = {"prompt": "p", "images": ["a.png"]}
        run = (groups.group(list, problem, num_samples=1, seed=0, index=index) for index in range(20))
        sampled = sampler.loop.run(gather_or_cancel(run))
    assert [group.images for group in sampled] == [shown] * 20
    assert most_held == 3


@pytest.mark.usefixtures("processor")
def test_untrained_groups_drop_their_pixels(model: Path, tmp_path: Path) -> None:
    problem: Problem = {"prompt": MARKER, "images": [file(tmp_path, "a.png")]}
    config = TrainConfig.of(
        model_name=str(model), batch_size=2, group_size=2, max_new_tokens=8, eval_samples=1,
        skip_without_signal=True, max_oversampling=2.0,
    )  # fmt: skip

    class Constant:
        def __iter__(self) -> Iterator[Problem]:
            return iter([problem])

        def held_out(self) -> list[Problem]:
            return [problem]

        def score(self, *_: object) -> float:
            return 1.0

    task = Constant()
    with serving(openai(is_bridge=True)) as server, closing(environment_stream(config, task)) as stream:
        stream.served(Endpoint(url=server.url), 1)
        evaluated = stream.evaluate(step=0)
        trained = stream.take(1, step=1)
        assert evaluated is not None
        assert [group.images for group in (*evaluated, *stream.skipped)] == [None] * 2
        assert trained[0].images is not None


def test_images_are_refused_outside_run_and_train(model: Path) -> None:
    problem: Problem = {"prompt": "a", "images": ["a.png"]}
    in_parts: Problem = {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}
    with pytest.raises(UsageError, match="has images: only bridge run and bridge train support them"):
        problems.encode(AutoTokenizer.from_pretrained(model), problem)
    with pytest.raises(UsageError, match="has images: only bridge run and bridge train support them"):
        as_chat(in_parts)
