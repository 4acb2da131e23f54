"""Image files are read as viewers show them, or refused in one line."""

import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from bridge.core import image_file
from bridge.errors import RewardError

WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def drawing() -> Image.Image:
    """Return a black line on a transparent background whose hidden color is also black."""
    made = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    made.putpixel((3, 3), (0, 0, 0, 255))
    return made


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_becomes_white(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    drawing().convert(mode).save(path)
    shown = image_file.read(str(path))
    assert (shown.mode, shown.getpixel((0, 0)), shown.getpixel((3, 3))) == ("RGB", WHITE, BLACK)


def test_opaque_image_keeps_its_pixels(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2), (250, 10, 20)).save(tmp_path / "a.png")
    shown = image_file.read(str(tmp_path / "a.png"))
    assert (shown.size, shown.getpixel((0, 0))) == ((4, 2), (250, 10, 20))
    assert image_file.fault(str(tmp_path / "a.png")) == ""


def test_image_is_rotated_upright(tmp_path: Path) -> None:
    lying = Image.new("RGB", (16, 8))
    exif = lying.getexif()
    exif[0x0112] = 6
    lying.save(tmp_path / "a.jpg", exif=exif)
    assert image_file.read(str(tmp_path / "a.jpg")).size == (8, 16)


@pytest.mark.parametrize(("name", "kind"), [("a.png", np.uint16), ("a.tiff", np.float32)])
def test_image_with_16_bit_channels_is_refused(tmp_path: Path, name: str, kind: type) -> None:
    path = str(tmp_path / name)
    Image.fromarray(np.arange(64).reshape(8, 8).astype(kind)).save(path)
    assert "has 16 bits or more per channel (mode " in image_file.fault(path)
    with pytest.raises(RewardError, match="expected 8"):
        image_file.read(path)


def test_eps_image_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.png")
    Image.new("RGB", (8, 8)).save(path, format="EPS")
    assert "is EPS, which needs an external program" in image_file.fault(path)
    with pytest.raises(RewardError, match="is EPS"):
        image_file.read(path)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int) -> bytes:
    """Return the start of a PNG file with this image size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def refused(path: Path | str) -> str:
    """Return the fault of an image, which must also be in the error when it is read."""
    fault = image_file.fault(str(path))
    with pytest.raises(RewardError) as caught:
        image_file.read(str(path))
    assert caught.value.message == fault
    assert "\n" not in fault
    return fault


def test_image_with_too_many_pixels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(8193, 8192))
    expected = f"{tmp_path}/a.png has 67,117,056 pixels (8,193 x 8,192), expected at most 67,108,864"
    assert expected in refused(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png(8192, 8192))
    assert image_file.fault(str(tmp_path / "a.png")) == ""
    (tmp_path / "a.png").write_bytes(png(65_535, 28_000))
    assert "Image size (1834980000 pixels) exceeds limit" in refused(tmp_path / "a.png")


def test_oversized_image_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.write(png(4, 4))
        file.truncate(1 << 40)
    assert "has 1,099,511,627,776 bytes, expected at most 268,435,456" in refused(tmp_path / "a.png")


@pytest.mark.parametrize("start", [b"\xff\xd8\xff\xe0", b"GIF89a"])
def test_search_for_an_image_in_zeros_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(image_file, "MAX_READS", 1000)
    with (tmp_path / "a.jpg").open("wb") as file:
        file.write(start)
        file.truncate(100_000)
    assert "no image was found in it within 1,000 reads" in refused(tmp_path / "a.jpg")


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, TypeError, KeyError, AssertionError, MemoryError])
@pytest.mark.parametrize("where", ["open", "load"])
def test_any_pillow_error_refuses_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.bmp")

    def fail(*_: object, **__: object) -> None:
        raise error("unheard of")

    monkeypatch.setattr(*((Image, "open", fail) if where == "open" else (ImageFile.ImageFile, "load", fail)))
    with pytest.raises(RewardError, match=f"a.bmp cannot be read: {error.__name__}"):
        image_file.read(str(tmp_path / "a.bmp"))
    assert ("cannot be read" in image_file.fault(str(tmp_path / "a.bmp"))) == (where == "open")


@pytest.mark.parametrize("name", ["x" * 300 + ".png", "a\0b.png", "\ud83d.png", "", "a.jsonl/x.png"], ids=range(5))
def test_impossible_file_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").touch()
    fault = image_file.fault(f"{tmp_path}/{name}")
    assert "there is no image" in fault
    assert fault.encode().isascii()  # no control characters, and printable everywhere
    with pytest.raises(RewardError, match="there is no image"):
        image_file.read(f"{tmp_path}/{name}")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO", "DDS"])
def test_truncated_file_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    Image.effect_noise((64, 64), 60).convert("RGB").save(tmp_path / "whole", format=kind)
    content = (tmp_path / "whole").read_bytes()
    assert image_file.read(str(tmp_path / "whole")).mode == "RGB"
    for end in range(0, len(content) - 64, max(1, len(content) // 40)):
        (tmp_path / "cut").write_bytes(content[:end])
        with suppress(RewardError):  # some formats decode a truncated file
            image_file.read(str(tmp_path / "cut"))
        image_file.fault(str(tmp_path / "cut"))
