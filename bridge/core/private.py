"""Leave passwords, tokens and keys out of what others may read: reports, curves, events, printed commands.

Not covered: files whose owner alone may read them, which hold everything (`config.json`, `serve.log`, the manifest).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
PRIVATE_CHOICES = ("start_command",)
"""Choices of which nothing is shown: a command line can hold a secret in any form."""
SECRET_FLAG = re.compile(r"--?[\w-]*(key|token|secret|password|credentials?)$", re.IGNORECASE)
FREE_FLAGS = ("--start-command", "--start_command")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VALUE_IN_URL = re.compile(r"(://[^\s?#]*\?|&)([^\s=&#]+)=[^\s&#]+")


def shown(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return `choices` as others may see them."""
    return {name: _shown(name, value) for name, value in choices.items()}


def shown_line(text: str) -> str:
    """Return `text` without the user names, passwords and query values of the URLs in it."""
    text = _USER_OF_URL.sub(HIDDEN, text)
    return _VALUE_IN_URL.sub(rf"\1\2={HIDDEN}", text)


def shown_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a command's arguments, the values of those flags hidden that hold a secret by their name."""
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_FLAG.match(name)) or name in FREE_FLAGS
        if hides_next and not argument.startswith("-"):
            yield HIDDEN
        else:
            yield f"{name}={HIDDEN}" if is_secret and equals else shown_line(argument)
        hides_next = is_secret and not equals


def _shown(name: str, value: object) -> object:
    if name in PRIVATE_CHOICES and value is not None:
        return HIDDEN
    return shown_line(value) if isinstance(value, str) else value
