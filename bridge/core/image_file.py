"""Image files: what is wrong with one, and its pixels."""

from pathlib import Path
from typing import Any

from bridge.core.foreign_code import shortened
from bridge.errors import RewardError, with_class

DEEP_MODES = ("I", "F")
"""How Pillow's modes begin whose numbers are larger than a byte. It clips them: nearly everything would be white."""
PROGRAMS = ("EPS", "WMF")
"""Formats that Pillow has other programs draw."""


def fault(path: str) -> str:
    """Return what is wrong with an image; empty if nothing is. Only the start of the file is read."""
    from PIL import Image

    if not Path(path).is_file():
        return f"there is no image {path}"
    try:
        with Image.open(path) as image:
            return _fault_of(path, image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"the image {path} cannot be read: {shortened(error, 200)}"


def read(path: str) -> Any:
    """Return an image upright and in RGB, on white where it is transparent, as vLLM's own routes do.

    Raises:
        RewardError: it cannot be read, its numbers are larger than a byte, or it is a program.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            its_fault = _fault_of(path, image)
            pixels = image if its_fault else _on_white(ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RewardError(
            f"the image {path} cannot be read: {with_class(error)}", remedy="replace the file, or leave the row out"
        ) from error
    if its_fault:
        raise RewardError(its_fault, remedy="save it as a PNG with 8 bits per channel, or leave the row out")
    return pixels


def _fault_of(path: str, image: Any) -> str:
    if image.format in PROGRAMS:
        return f"the image {path} is {image.format}, which other programs draw, expected a format of pixels such as PNG"
    if image.mode.startswith(DEEP_MODES):
        return f"the image {path} has 16 bits or more per channel (mode {image.mode}), expected 8"
    return ""


def _on_white(image: Any) -> Any:
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
