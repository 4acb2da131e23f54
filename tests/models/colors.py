"""A task that cannot be solved without its images: name the color of a square. A JSONL data set, and its reward."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

COLORS = {"red": (220, 20, 30), "green": (30, 200, 60), "blue": (20, 40, 230), "white": (250, 250, 245)}
SIZES = ((16, 16), (24, 16), (16, 32))
"""Pixels of images: other sizes have other numbers of tokens, and so other positions."""
SHADES = 5


def write(folder: Path, marker: str) -> tuple[Path, Path]:
    """Write training and evaluation problems, with images of every size in several shades of each color.

    `marker` stands for the image in the text. All prompts of a size have the same token ids.
    """
    (folder / "images").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for name, color in COLORS.items():
        for size in SIZES:
            for shade in range(SHADES):
                path = f"images/{name}-{size[0]}x{size[1]}-{shade}.png"
                Image.new("RGB", size, tuple(min(255, max(0, part + 6 * shade - 12)) for part in color)).save(
                    folder / path
                )
                rows.append({"prompt": f"{marker}color:", "images": [path], "answer": name})
    kept = [row for row in rows if row["images"][0].endswith("-0.png")]
    for name, of_split in (("train", [row for row in rows if row not in kept]), ("test", kept)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in of_split))
    return folder / "train.jsonl", folder / "test.jsonl"


def names_it(problem: dict[str, Any], completion: str) -> float:
    """Return 1 if the completion's first character belongs to the color; each character belongs to one of four."""
    return float(bool(completion) and ord(completion[0]) % len(COLORS) == [*COLORS].index(problem["answer"]))
