"""Hide passwords, tokens, keys and control characters in what others may read: reports, curves, events, terminals.

Files that only their owner may read hold everything (`config.json`, `serve.log`, the manifest).
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
PRIVATE_CHOICES = ("start_command",)
"""Choices that are hidden as a whole: a command line can hold a secret in any form."""
SECRET_FLAG = re.compile(r"--?[\w-]*(key|token|secret|password|credentials?)$", re.IGNORECASE)
FREE_FLAGS = ("--start-command", "--start_command")
ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible characters: controls, marks of direction, halves of a surrogate pair."""
JOINERS = dict.fromkeys(map(ord, "\u200c\u200d\ufe0e\ufe0f"))
"""Left out: they join characters to a picture, whose width differs between terminals."""
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VALUE_IN_URL = re.compile(r"(://[^\s?#]*\?|&)([^\s=&#]+)=[^\s&#]+")


def shown(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return `choices` with their secrets hidden."""
    lines = {name: shown_line(value) for name, value in choices.items() if isinstance(value, str)}
    hidden = {name: HIDDEN for name in PRIVATE_CHOICES if choices.get(name) is not None}
    return {**choices, **lines, **hidden}


def shown_line(text: str) -> str:
    """Hide the user names, passwords and query values of the URLs in `text`."""
    text = _USER_OF_URL.sub(HIDDEN, text)
    return _VALUE_IN_URL.sub(rf"\1\2={HIDDEN}", text)


def shown_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a command's arguments, with the values of flags hidden whose names suggest a secret."""
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_FLAG.match(name)) or name in FREE_FLAGS
        if hides_next and not argument.startswith("-"):
            yield HIDDEN
        else:
            yield f"{name}={HIDDEN}" if is_secret and equals else shown_line(argument)
        hides_next = is_secret and not equals


def cleaned(text: str) -> str:
    """Return `text` with control characters as visible escapes; line breaks stay."""
    text = text.replace("\r\n", "\n").expandtabs(4).translate(JOINERS)
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if char != "\n" and unicodedata.category(char) in ACTING else char
        for char in text
    )
