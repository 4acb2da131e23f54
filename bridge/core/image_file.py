"""Check image files, and read their pixels."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.core import paths
from bridge.core.foreign_code import reason_of
from bridge.core.redaction import escaped
from bridge.errors import RewardError

DEEP_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits. Pillow clips their values, which would make most pixels white."""
REPLACE = "replace the file, or leave the row out"
PROGRAMS = ("EPS", "WMF")
"""Formats that Pillow renders with external programs."""
MAX_PIXELS = 8192 * 8192
"""Largest image; converting one with twice as many pixels to RGB takes gigabytes of memory."""
MAX_BYTES = 2**28
MAX_READS = 1_000_000
"""Maximum reads per file. Pillow searches for the start of some formats byte by byte: a file of zeros takes hours."""


class _Searched(io.BufferedReader):
    """A file reader that raises after `MAX_READS` reads."""

    _num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise ValueError(f"no image was found in it within {MAX_READS:,} reads")
        return super().read(size)


def fault(path: str) -> str:
    """Return what is wrong with an image; empty if it is valid. Only the start of the file is read."""
    try:
        with _opened(path):
            return ""
    except RewardError as error:
        return error.message


def read(path: str) -> Any:
    """Return an image as vLLM's own routes prepare it: upright, in RGB, with transparent parts on white.

    Raises:
        RewardError: the image cannot be read, is too large, has more than 8 bits per channel, or needs an external
            program to render.
    """
    from PIL import ImageOps

    with _opened(path) as image:
        return _on_white(ImageOps.exif_transpose(image))


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open an image after checking its header; convert any exception in the block to RewardError."""
    from PIL import Image, UnidentifiedImageError

    name = escaped(path)
    if not paths.is_file(path):
        raise RewardError(f"there is no image {name}", hint=REPLACE)
    try:
        with open(path, "rb", buffering=0) as file, _Searched(file) as searched:  # noqa: PTH123  Path.open makes no FileIO
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > MAX_BYTES:
                what = f"the image {name} has {num_bytes:,} bytes, expected at most {MAX_BYTES:,}"
                raise RewardError(what, hint="save it smaller, or leave the row out")
            with Image.open(searched) as image:
                if what := _fault_of(name, image):
                    raise RewardError(
                        what, hint="save it smaller, as a PNG with 8 bits per channel, or leave the row out"
                    )
                yield image
    except RewardError:
        raise
    except UnidentifiedImageError as error:
        raise RewardError(f"the image {name} cannot be read: cannot identify image file", hint=REPLACE) from error
    except Exception as error:  # Pillow's plugins raise any exception for a damaged file
        why = f"{type(error).__name__}{reason_of(error)}"
        raise RewardError(f"the image {name} cannot be read: {why}", hint=REPLACE) from error


def _fault_of(name: str, image: Any) -> str:
    width, height = image.size
    if width * height > MAX_PIXELS:
        shown = f"{width * height:,} pixels ({width:,} x {height:,})"
        return f"the image {name} has {shown}, expected at most {MAX_PIXELS:,}"
    if image.format in PROGRAMS:
        return f"the image {name} is {image.format}, which needs an external program, expected pixels, as in PNG"
    if image.mode.startswith(DEEP_MODES):
        return f"the image {name} has 16 bits or more per channel (mode {image.mode}), expected 8"
    return ""


def _on_white(image: Any) -> Any:
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
