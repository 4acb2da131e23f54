"""Encode prompts as token ids with every image token expanded, and their images with the model's own processor.

The server and the trainer both use this result: neither expands image tokens nor processes pixels again.

Not covered: the embeddings of an image (`bridge/passes/image_embeddings.py`), prompts without images (`problems.py`).
"""

import asyncio
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase

from bridge.core import image_file
from bridge.core.foreign_code import described
from bridge.errors import RewardError, UnsupportedModelError, UsageError, with_class
from bridge.passes.image_embeddings import SIZES
from bridge.planning.model_size import SEEING
from bridge.rollouts import chat_template, problems
from bridge.types import Array, Images, Message, Problem

BESIDE_TENSORS = ("input_ids", "attention_mask", "mm_token_type_ids")
"""Outputs of a processor that are not image tensors."""
PART = {"type": "image"}
"""The message part that marks the position of an image."""
PLACE = "<image>"
"""Placeholder for an image in message texts, as data sets for other systems write it."""
WRITTEN = {"image_break_token": "the end of a row of an image", "image_end_token": "the end of an image"}
"""Attribute of a processor -> the meaning of the token it holds, which the processor writes beside image tokens."""
GRIDS = "image_grid_thw"
"""Key of a processor's output with the number of patches of each image: frames, rows and columns."""


class Encoded(NamedTuple):
    """A prompt as token ids, and its images, or None if it has no images."""

    prompt: tuple[int, ...]
    images: Images | None


class Prompts:
    """Encodes prompts; the model's processor is loaded for the first one with images."""

    def __init__(
        self, model_name: str, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], *, pass_size: int = 1
    ) -> None:
        """`template` is passed to the chat template; `pass_size` is the number of GPUs that compute a pass together."""
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._template = template
        self._pass_size = pass_size
        self._in_turn = threading.Lock()

    def encode(self, problem: Problem) -> Encoded:
        """Return a problem's prompt.

        Raises:
            RewardError: the prompt cannot be encoded, an image cannot be read, or the prompt has no marker for it.
            UnsupportedModelError: the model does not support images.
            UsageError: the model's processor cannot be loaded, or several GPUs compute a pass together.
        """
        if not problem.get("images"):
            return Encoded(problems.encode(self._tokenizer, problem, **self._template), None)
        with self._in_turn:  # a tokenizer can be used by one thread at a time
            return self._with_images(problem)

    async def encode_beside(self, problem: Problem) -> Encoded:
        """Return the same as `encode`, without blocking other requests while images are read."""
        return await asyncio.to_thread(self.encode, problem) if problem.get("images") else self.encode(problem)

    @cached_property
    def _config(self) -> Any:
        config = AutoConfig.from_pretrained(self._model_name, trust_remote_code=False)
        if not hasattr(config, "vision_config"):
            raise UnsupportedModelError(
                f"a prompt has images, but {self._model_name} is a {config.model_type}, which has no vision model",
                hint="use a model that takes images, such as Qwen3-VL (docs/families.md), or leave the images out",
            )
        if config.model_type not in SEEING:
            raise UnsupportedModelError(
                f"a prompt has images, but {self._model_name} is a {config.model_type}, which Bridge trains on text"
                " only",
                hint=f"use a model type with image support: {', '.join(sorted(SEEING))}",
            )
        if self._pass_size > 1:
            raise UsageError(
                f"a prompt has images, but {self._pass_size} GPUs compute a pass together: the vision model cannot be"
                " split across GPUs",
                hint="leave out --tensor-parallel-size and --context-parallel-size; --gpus N trains on several GPUs",
            )
        return config

    @cached_property
    def _processor(self) -> Any:
        try:
            return AutoProcessor.from_pretrained(self._model_name, trust_remote_code=False)
        except Exception as error:  # the error's class depends on the model and on optional libraries
            raise UsageError(
                f"the image processor of {self._model_name} cannot be loaded: {with_class(error)}",
                hint="pip install torchvision pillow, and copy preprocessor_config.json and processor_config.json"
                " into the model's folder",
            ) from error

    def _with_images(self, problem: Problem) -> Encoded:
        config = self._config
        processor = self._processor
        problems.check_form(problem)
        text = self._text(problem)
        _check_markers(text, problem, processor)
        read = [image_file.read(path) for path in problem["images"]]
        try:
            made = processor(text=[text], images=read, return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # a processor may raise anything for an unusual image
            raise RewardError(
                f"the model's processor rejects {', '.join(problem['images'])}: {with_class(error)}",
                hint="resize the image, or remove the row",
            ) from error
        ids = (*self._before(problem, text), *made["input_ids"][0].tolist())
        dtype = getattr(config, "dtype", None) or torch.float32
        tensors = {name: value for name, value in made.items() if name not in BESIDE_TENSORS}
        arrays = tuple(_array(name, tensor, dtype) for name, tensor in sorted(tensors.items()))
        grids = _grids(config, made)
        return Encoded(ids, Images.of(arrays, starts=_starts(ids, config.image_token_id, grids), grids=grids))

    def _before(self, problem: Problem, text: str) -> Sequence[int]:
        """Return the tokens that the tokenizer prepends to a text; none if a chat template has written them already."""
        if not isinstance(self._prompt(problem), str):
            return ()
        own = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = problems.begun(self._tokenizer, text)
        return whole[: len(whole) - len(own)]

    def _prompt(self, problem: Problem) -> str | list[Message]:
        prompt = problem["prompt"]
        return prompt if self._chat_template is not None else problem.get("plain_prompt") or prompt

    @property
    def _chat_template(self) -> str | dict[str, str] | None:
        """The processor's or tokenizer's chat template, or several by name."""
        template: str | dict[str, str] | None = getattr(self._processor, "chat_template", None)
        return template or self._tokenizer.chat_template

    def _text(self, problem: Problem) -> str:
        """Return the prompt as text, with one image token for each image."""
        prompt = self._prompt(problem)
        if isinstance(prompt, str):
            return prompt
        if self._chat_template is None:
            raise RewardError(
                "the environment's prompts are chat messages, but the model has no chat template",
                hint="write the prompts as text, or use a model with a chat template",
            )
        messages = [*_in_parts(chat_template.as_known(prompt, keeps_parts=True), problem)]
        given = chat_template.arguments(self._chat_template, problem, self._template)
        source = chat_template.applied(self._chat_template, has_tools="tools" in given)
        render = partial(
            chat_template.apply_chat_template, self._tokenizer, chat_template=source, tokenize=False, **given
        )
        text: str = render(messages)
        chat_template.refuse_lost(render, messages)
        return text


def _check_markers(text: str, problem: Problem, processor: Any) -> None:
    """Raise RewardError unless the text has one marker per image, and no tokens that only the processor adds."""
    num_markers = text.count(processor.image_token)
    num_images = len(problem["images"])
    if num_markers != num_images:
        raise RewardError(
            f"the prompt {described(problem['prompt'])} has {num_markers} places for images, expected {num_images},"
            f" for {', '.join(problem['images'])}",
            hint=f"write {processor.image_token} in the text once per image, or use chat messages with one"
            ' part {"type": "image"} per image',
        )
    for name, meaning in WRITTEN.items():
        token = getattr(processor, name, None)
        if token and token in text:
            raise RewardError(
                f"the text of the prompt {described(problem['prompt'])} has {token}, which stands for {meaning}",
                hint=f"remove {token} from the text, or spell it differently: the model's processor adds it"
                f" after {processor.image_token}",
            )


def _in_parts(messages: Sequence[Message], problem: Problem) -> Iterator[Message]:
    """Yield the messages with their contents as lists of parts.

    An image is marked by a part, or by `<image>` in a text, as verl, ms-swift and LLaMA-Factory write it. Without any
    markers, all images come before the user's first text.

    Raises:
        RewardError: the number of markers in the texts differs from the number of images.
    """
    parted = [{**message, "content": _parts(message.get("content") or "")} for message in messages]
    has_parts = any(part.get("type") == "image" for message in parted for part in message["content"])
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    num_places = sum(text.count(PLACE) for text in texts)
    num_images = len(problem["images"])
    if num_places and not has_parts:
        if num_places != num_images:
            raise RewardError(
                f"the text of the prompt {described(problem['prompt'])} has {num_places} places {PLACE}, expected"
                f" {num_images}, for {', '.join(problem['images'])}",
                hint=f'write {PLACE} once per image, or one part {{"type": "image"}} per image',
            )
        parted = [{**message, "content": _placed(message.get("content") or "")} for message in messages]
    # Source: the order is that of `prepare_multimodal_messages` in TRL 1.16.
    left = 0 if has_parts or num_places else num_images
    for message in parted:
        if left and message["role"] == "user":
            message["content"] = [*([PART] * left), *message["content"]]
            left = 0
        yield message


def _placed(content: Any) -> list[dict[str, Any]]:
    """Return a content as a list of parts, with an image part in place of each `<image>`."""
    if not isinstance(content, str):
        return _parts(content)
    texts = [[{"type": "text", "text": text}] if text else [] for text in content.split(PLACE)]
    return [part for text in texts for part in (PART, *text)][1:]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _array(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Array:
    """Return a tensor in a form that can be sent; pixel values get the model's dtype, as its vision model expects."""
    kept = tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int64)
    content = kept.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return Array(name=name, dtype=str(kept.dtype).removeprefix("torch."), shape=tuple(kept.shape), content=content)


def _grids(config: Any, made: Mapping[str, torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Return the size in tokens of each run of image tokens: frames, rows and columns.

    If the processor reports sizes in pixels, each row of an image is a run.
    """
    if GRIDS in made:
        merged = config.vision_config.spatial_merge_size
        return tuple((t, rows // merged, columns // merged) for t, rows, columns in made[GRIDS].tolist())
    merged = config.spatial_merge_size * config.vision_config.patch_size
    return tuple((1, 1, width // merged) for height, width in made[SIZES].tolist() for _ in range(height // merged))


def _starts(ids: Sequence[int], image_token: int, grids: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return where each run of image tokens begins.

    Raises:
        UnsupportedModelError: the lengths of the runs do not match the images, for example because tokens were
            expanded twice.
    """
    runs = [(token, [index for index, _ in run]) for token, run in groupby(enumerate(ids), key=lambda pair: pair[1])]
    of_images = [indices for token, indices in runs if token == image_token]
    if [len(indices) for indices in of_images] != [math.prod(grid) for grid in grids]:
        lengths = ", ".join(str(len(indices)) for indices in of_images) or "no"
        expected = ", ".join(str(math.prod(grid)) for grid in grids)
        raise UnsupportedModelError(
            f"the model's processor wrote {lengths} image tokens, expected {expected}, to match the image patches",
            hint="separate images with text or with the model family's own tokens; if they are separated, use a model"
            " and a processor of the same version, from a family in docs/families.md",
        )
    return tuple(indices[0] for indices in of_images)
