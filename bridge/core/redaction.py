"""Redact passwords, tokens and keys in what others may read (reports, events, environments); escape control characters.

Files that only their owner may read hold everything (`config.json`, `serve.log`, the manifest).

Source: proc(5), `/proc/PID/environ` and fields 50 and 51 of `/proc/PID/stat`; setenv(3), which copies.
"""

import os
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import UsageError

HIDDEN = "***"
PRIVATE_CHOICES = ("start_command",)
"""Choices that are hidden as a whole: a command line can hold a secret in any form."""
SECRET_FLAG = re.compile(r"--?[\w-]*(key|token|secret|password|credentials?)$", re.IGNORECASE)
SECRET_VARIABLE = re.compile(
    r"(^|_)(keys?|token|secrets?|credentials?|passphrase|passwd)(_|$)|_(pass|pwd|pat|auth)$"
    r"|(api|access|secret|private)key|(access|auth)token|password",
    re.IGNORECASE,
)
OF_THE_HUB = "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"
NEEDS_THE_HUB = re.compile(r"huggingface\.co|\bon the Hub\b|\bgated (repo|dataset)\b", re.IGNORECASE)
"""Errors of the Hugging Face libraries about a private or gated data set; they do not name the variable."""
FREE_FLAGS = ("--start-command", "--start_command")
ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible characters: controls, marks of direction, halves of a surrogate pair."""
JOINERS = dict.fromkeys(map(ord, "\u200c\u200d\ufe0e\ufe0f"))
"""Left out: they join characters to a picture, whose width differs between terminals."""
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_VALUE_IN_URL = re.compile(r"(://[^\s?#]*\?|&)([^\s=&#]+)=[^\s&#]+")


def redacted(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return `choices` without their secrets."""
    lines = {name: redact_urls(value) for name, value in choices.items() if isinstance(value, str)}
    hidden = {name: HIDDEN for name in PRIVATE_CHOICES if choices.get(name) is not None}
    return {**choices, **lines, **hidden}


def redact_urls(text: str) -> str:
    """Hide the user names, passwords and query values of the URLs in `text`."""
    text = _USER_OF_URL.sub(HIDDEN, text)
    return _VALUE_IN_URL.sub(rf"\1\2={HIDDEN}", text)


def redacted_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a command's arguments, with the values of flags hidden whose names suggest a secret."""
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_FLAG.match(name)) or name in FREE_FLAGS
        if hides_next and not argument.startswith("-"):
            yield HIDDEN
        else:
            yield f"{name}={HIDDEN}" if is_secret and equals else redact_urls(argument)
        hides_next = is_secret and not equals


def worker_environment(kept: Collection[str]) -> dict[str, str]:
    """Return the environment of this process without secrets, except the variables in `kept`.

    Raises:
        UsageError: one of these is not set.
    """
    if missing := sorted(set(kept) - os.environ.keys()):
        raise UsageError(
            f"--worker-env {','.join(missing)}: not set in this environment", hint=f"export {missing[0]}=..."
        )
    hidden_names = hidden_variables(kept)
    return {name: value for name, value in os.environ.items() if name not in hidden_names}


def hidden_variables(kept: Collection[str]) -> list[str]:
    """Return the names of the variables of this process that its workers do not get."""
    return [name for name in os.environ if SECRET_VARIABLE.search(name) and name not in kept]


def env_hint(text: str, kept: Collection[str]) -> str:
    """Return a hint to append if `text` names a variable that workers do not get; else an empty string."""
    of_the_hub = OF_THE_HUB if NEEDS_THE_HUB.search(text) else ()
    if named := [
        name for name in hidden_variables(kept) if name in of_the_hub or re.search(rf"\b{re.escape(name)}\b", text)
    ]:
        return f"; {named[0]} is hidden from rewards, tools and agents; to pass it on: --worker-env {','.join(named)}"
    return ""


def hide_environment() -> None:
    """Overwrite the secrets in `/proc/PID/environ` of this process, where they stay when `os.environ` loses them.

    All processes of the same user can read that file, including those that a worker starts. `os.environ` is unchanged.
    """
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    address = int(fields[47])
    end = int(fields[48])
    for entry in ctypes.string_at(address, end - address).split(b"\0"):
        name, equals, _ = entry.partition(b"=")
        if equals and SECRET_VARIABLE.search(os.fsdecode(name)):
            if name in os.environb:
                os.putenv(name, os.environb[name])  # a copy, in place of the pointer to this memory
            ctypes.memset(address, 0, len(entry))
        address += len(entry) + 1


def escaped(text: str) -> str:
    """Return `text` with control characters as visible escapes, except line breaks."""
    text = text.replace("\r\n", "\n").expandtabs(4).translate(JOINERS)
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if char != "\n" and unicodedata.category(char) in ACTING else char
        for char in text
    )
