"""Text that models, agents and rewards wrote, made fit for a line of a log or a terminal."""

import unicodedata

ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible characters: controls, marks of direction, halves of a surrogate pair."""
JOINERS = dict.fromkeys(map(ord, "\u200c\u200d\ufe0e\ufe0f"))
"""Left out: they join characters to a picture, whose width differs between terminals."""


def cleaned(text: str) -> str:
    """Return `text` with control characters as visible escapes; line breaks stay."""
    text = text.replace("\r\n", "\n").expandtabs(4).translate(JOINERS)
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if char != "\n" and unicodedata.category(char) in ACTING else char
        for char in text
    )
