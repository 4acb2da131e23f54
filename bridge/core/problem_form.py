"""Check the form of a problem, from whatever source: its prompt, its messages and its images."""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.core import image_file, json_lines
from bridge.core.foreign_code import LONE_SURROGATE, described, shortened

DEEPEST = 100
"""Maximum depth of a prompt: the libraries that render, send and save prompts recurse into it."""


def problem_fault(problem: object, *, opens_images: bool = True) -> str:
    """Return what is wrong with `problem`; empty if it is valid. Only the beginning of each image file is read."""
    if not isinstance(problem, dict):
        return f"found {described(problem)} of type {type(problem).__name__}, expected a dict with a prompt"
    if "prompt" not in problem:
        return f"no prompt, found the keys {shortened(list(problem))}"
    prompt = problem["prompt"]
    plain = problem.get("plain_prompt")
    images = problem.get("images")
    if not isinstance(plain, str | None):
        return f"its plain_prompt is {described(plain)}, expected text"
    fault = _text_fault("plain_prompt", plain) or images_fault(images, opens=opens_images)
    if isinstance(prompt, str):
        return (_text_fault("prompt", prompt) or fault) if prompt else "its prompt is empty"
    has_images = bool(images)
    parts = "; with images, content may be parts {'type': 'text', 'text': text} and {'type': 'image'}"
    expected = "{'role': text, 'content': text}" + (parts if has_images else "")
    if not isinstance(prompt, list) or not prompt:
        return f"its prompt is {described(prompt)}, expected text or messages {expected}"
    wrong = next((index for index, message in enumerate(prompt) if not _is_message(message, has_images)), None)
    if wrong is not None:
        return f"message {wrong + 1} of its prompt is {described(prompt[wrong])}, expected {expected}"
    fault = _text_fault("prompt", prompt) or fault
    return fault or (_image_parts_fault(prompt, len(problem["images"])) if has_images else "")


def images_fault(images: object, *, opens: bool = True) -> str:
    """Return what is wrong with a problem's images, and with their files if `opens` is set; empty if they are valid."""
    if not images:
        return ""
    if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
        return f"its images are {described(images)}, expected a list of paths"
    return next((fault for path in images if opens and (fault := image_file.fault(path))), "")


def _text_fault(name: str, prompt: Any) -> str:
    """Return what is wrong with the characters or the depth of the prompt `name`; empty if it is valid."""
    for value, depth in _inside(prompt):
        if depth > DEEPEST:
            return f"its {name} {described(prompt)} is nested more than {DEEPEST} levels deep"
        if isinstance(value, str) and LONE_SURROGATE.search(value):
            return f"its {name} {described(prompt)} has half of a surrogate pair, which is not a character"
    return ""


def _inside(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield a value, and the keys and values inside it, with their depths."""
    left = [(value, 0)]
    while left:
        inner, depth = left.pop()
        yield inner, depth
        if isinstance(inner, Mapping):
            left += [(entry, depth + 1) for pair in inner.items() for entry in pair]
        elif isinstance(inner, list | tuple):
            left += [(entry, depth + 1) for entry in inner]


def _image_parts_fault(messages: list[Any], num_images: int) -> str:
    """Return what is wrong with the image parts in messages; empty if each image has one, or there are none at all."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    num_places = sum(part["type"] == "image" for part in parts)
    if num_places:
        return "" if num_places == num_images else f"its messages have {num_places} image parts for {num_images} images"
    if any(message["role"] == "user" for message in messages):
        return ""
    return "it has images, but neither a user message to add them to nor parts {'type': 'image'}"


def _is_message(message: object, has_images: bool) -> bool:
    """Return whether `message` is a chat message, whose content is text or a list of parts.

    A turn with tool calls may have no content.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return True
    if isinstance(content, list):
        return all(_is_text(part) or (has_images and _is_image(part)) for part in content)
    return isinstance(content, str)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and json_lines.without_nulls(part) == {"type": "image"}
