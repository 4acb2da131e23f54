"""Text that somebody else wrote, made fit for a terminal: nothing in it acts, and no line is wider than it may be.

Not covered: markup, which `rich.text.Text` never reads.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import islice

ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of what is no character to look at: controls, marks of direction, halves of a pair."""
JOINERS = dict.fromkeys(map(ord, "\u200c\u200d\ufe0e\ufe0f"))
"""What makes one picture of several characters, whose width each terminal sees differently: left out."""
FIRST_WIDE = "\u0530"
"""Latin, Greek and Cyrillic come before it. No terminal draws any other character wider than two cells."""
READ_CHARACTERS = 4000
"""So much of a text is looked at, for the few lines that are shown of it."""
WORD = re.compile(r"\s*\S+|\s+")


def first_lines(text: str, width: int, num_lines: int) -> list[str]:
    """Return the first lines of `text` and, where they are not all, its last one."""
    kept = list(islice(wrapped(cleaned(text[:READ_CHARACTERS]), width), num_lines + 1))
    if len(kept) <= num_lines and len(text) <= READ_CHARACTERS:
        return kept
    return [*kept[: num_lines - 2], "…", *_ending(text, width)[-1:]]


def last_lines(text: str, width: int, num_lines: int) -> list[str]:
    """Return the last lines of `text`."""
    kept = _ending(text, width - 2)
    return kept if len(kept) <= num_lines else [f"… {kept[-num_lines].lstrip()}", *kept[len(kept) - num_lines + 1 :]]


def cleaned(text: str) -> str:
    """Return `text` with everything that could act on a terminal as a visible escape; lines stay lines."""
    text = text.replace("\r\n", "\n").expandtabs(4).translate(JOINERS)
    return "".join(
        character if character == "\n" or _is_harmless(character) else _escaped(character) for character in text
    )


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of cleaned `text`, at most `width` cells each in any terminal, broken between words."""
    for line in text.split("\n"):
        yield from _wrapped_line(line, width)


def cells(text: str) -> int:
    """Return how many cells `text` takes at most."""
    return sum(1 if character < FIRST_WIDE else 2 for character in text)


def _ending(text: str, width: int) -> list[str]:
    return list(wrapped(cleaned(text.rstrip()[-READ_CHARACTERS:]), width))


def _wrapped_line(line: str, width: int) -> Iterator[str]:
    current, used, is_first = "", 0, True
    for word in WORD.findall(line):
        if used and used + cells(word) > width:
            yield current
            current, used, is_first = "", 0, False
        for character in word if current or is_first else word.lstrip():  # an indentation stays
            if used + cells(character) > width:
                yield current
                current, used, is_first = "", 0, False
            current, used = current + character, used + cells(character)
    yield current


def _is_harmless(character: str) -> bool:
    return " " <= character <= "~" or unicodedata.category(character) not in ACTING


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
