"""Image files become the pixels that a person sees in them, or are refused in one line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bridge.core import image_file
from bridge.errors import RewardError

WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def drawing() -> Image.Image:
    """Return a black line on a transparent background, whose hidden color is black, too."""
    made = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    made.putpixel((3, 3), (0, 0, 0, 255))
    return made


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_becomes_white(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    drawing().convert(mode).save(path)
    shown = image_file.read(str(path))
    assert (shown.mode, shown.getpixel((0, 0)), shown.getpixel((3, 3))) == ("RGB", WHITE, BLACK)


def test_an_opaque_image_keeps_its_pixels(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2), (250, 10, 20)).save(tmp_path / "a.png")
    shown = image_file.read(str(tmp_path / "a.png"))
    assert (shown.size, shown.getpixel((0, 0))) == ((4, 2), (250, 10, 20))
    assert image_file.fault(str(tmp_path / "a.png")) == ""


def test_an_image_is_turned_upright(tmp_path: Path) -> None:
    lying = Image.new("RGB", (16, 8))
    exif = lying.getexif()
    exif[0x0112] = 6
    lying.save(tmp_path / "a.jpg", exif=exif)
    assert image_file.read(str(tmp_path / "a.jpg")).size == (8, 16)


@pytest.mark.parametrize(("name", "kind"), [("a.png", np.uint16), ("a.tiff", np.float32)])
def test_more_than_a_byte_per_channel_is_refused(tmp_path: Path, name: str, kind: type) -> None:
    path = str(tmp_path / name)
    Image.fromarray(np.arange(64).reshape(8, 8).astype(kind)).save(path)
    assert "has 16 bits or more per channel (mode " in image_file.fault(path)
    with pytest.raises(RewardError, match="expected 8"):
        image_file.read(path)


def test_an_image_that_is_a_program_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.png")
    Image.new("RGB", (8, 8)).save(path, format="EPS")
    assert "is EPS, which other programs draw" in image_file.fault(path)
    with pytest.raises(RewardError, match="is EPS"):
        image_file.read(path)
