"""How the page writes things: numbers, times, amounts, and texts that anybody may have written.

Not covered: where they stand (`template/report.html.j2`).
"""

import unicodedata
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

LARGE = {1e12: "T", 1e9: "G", 1e6: "M"}
"""How numbers are written that are as large."""
UNIT_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
KEPT = "\n\t\u200c\u200d"
"""Characters without a shape of their own that are kept: white space, and what joins letters in Persian or emoji."""


def shown(value: float | None, digits: int = 4) -> str:
    """Return a number with so many digits that count, as the page's script writes it too."""
    if value is None:
        return "–"
    if value and abs(value) < 1e-4:
        return f"{value:.2e}".replace("e-0", "e-")
    rounded = float(f"{value:.{digits}g}")
    for size, letter in LARGE.items():
        if abs(rounded) >= size:
            return f"{rounded / size:,.10g}{letter}"
    return f"{rounded:,.10g}"


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def in_bytes(number: float) -> str:
    """Return an amount of memory in the unit that suits it."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if number >= UNIT_BYTES[unit]), "")
    return f"{number / UNIT_BYTES[unit]:.3g} {unit}" if unit else f"{number:,.0f} bytes"


def stretch(ends: tuple[datetime, datetime]) -> str:
    """Return from when to when, the day once where it is one."""
    begin, end = ends
    same_day = begin.date() == end.date()
    return f"{begin:%Y-%m-%d %H:%M} to {end:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}}"


def code(text: str) -> "Markup":
    """Return a text whose parts between backticks are code."""
    from markupsafe import Markup, escape

    pieces = [escape(visible(piece)) for piece in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(each) if at % 2 else each for at, each in enumerate(pieces))


def visible(text: str) -> str:
    """Return `text` with every character that could hide or reorder others spelt out."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in KEPT or character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(character) == "Zs":  # spaces of other widths
        return character
    return f"⟨U+{code:04X}⟩"
