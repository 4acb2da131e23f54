"""Redact secrets where others may read them (reports, events, environments), and escape control characters.

Files that only their owner may read are not redacted (`config.json`, `serve.log`, the manifest).

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
"""Settings that are hidden entirely: a command line can contain a secret in any form."""
SECRET_FLAG = re.compile(r"--?[\w-]*(key|token|secret|password|credentials?)$", re.IGNORECASE)
SECRET_VARIABLE = re.compile(
    r"(^|_)(keys?|token|secrets?|credentials?|passphrase|passwd)(_|$)|_(pass|pwd|pat|auth)$"
    r"|(api|access|secret|private)key|(access|auth)token|password",
    re.IGNORECASE,
)
OF_THE_HUB = "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"
NEEDS_THE_HUB = re.compile(r"huggingface\.co|\bon the Hub\b|\bgated (repo|dataset)\b", re.IGNORECASE)
"""Matches the Hugging Face libraries' errors about private or gated data sets, which do not name the variable."""
FREE_FLAGS = ("--start-command", "--start_command")
ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible characters: control characters, direction marks, halves of surrogate pairs."""
JOINERS = dict.fromkeys(map(ord, "\u200c\u200d\ufe0e\ufe0f"))
"""Characters to drop: they join others into one glyph, whose width differs between terminals."""
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
    """Yield a command's arguments, hiding the values of flags whose names suggest a secret."""
    is_next_hidden = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_FLAG.match(name)) or name in FREE_FLAGS
        if is_next_hidden and not argument.startswith("-"):
            yield HIDDEN
        else:
            yield f"{name}={HIDDEN}" if is_secret and equals else redact_urls(argument)
        is_next_hidden = is_secret and not equals


def worker_environment(kept: Collection[str]) -> dict[str, str]:
    """Return this process's environment without secrets, except for the variables in `kept`.

    Raises:
        UsageError: a variable in `kept` is not set.
    """
    if missing := sorted(set(kept) - os.environ.keys()):
        raise UsageError(
            f"--worker-env {','.join(missing)}: not set in this environment", hint=f"export {missing[0]}=..."
        )
    hidden_names = hidden_variables(kept)
    return {name: value for name, value in os.environ.items() if name not in hidden_names}


def hidden_variables(kept: Collection[str]) -> list[str]:
    """Return the names of this process's environment variables that are hidden from its workers."""
    return [name for name in os.environ if SECRET_VARIABLE.search(name) and name not in kept]


def env_hint(text: str, kept: Collection[str]) -> str:
    """Return a hint to append if `text` names a variable that is hidden from workers; otherwise an empty string."""
    of_the_hub = OF_THE_HUB if NEEDS_THE_HUB.search(text) else ()
    if named := [
        name for name in hidden_variables(kept) if name in of_the_hub or re.search(rf"\b{re.escape(name)}\b", text)
    ]:
        return f"; {named[0]} is hidden from rewards, tools and agents; to pass it on: --worker-env {','.join(named)}"
    return ""


def hide_environment() -> None:
    """Overwrite the secrets in this process's `/proc/PID/environ`, where they remain even if `os.environ` drops them.

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
                os.putenv(name, os.environb[name])  # replaces the pointer to this memory with a copy
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
