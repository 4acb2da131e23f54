"""Bridge's cache: what can be made again, the demo's models and the bytecode of packages."""

import importlib.util
import os
import sys
from pathlib import Path


def folder() -> Path:
    """Return `$XDG_CACHE_HOME/bridge`, else `~/.cache/bridge`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "bridge"


def keep_bytecode() -> None:
    """Keep the bytecode of all packages in the cache, for this process and those that it starts, if nothing else does.

    Symptom: Bridge and vLLM take twice as long to import their packages, at every start.
    Cause: the packages were installed without bytecode, as uv does, and Python may not write it beside them: many
    container images set PYTHONDONTWRITEBYTECODE. A PYTHONPYCACHEPREFIX of the user's own is left as it is.
    """
    torch = importlib.util.find_spec("torch")  # stands for all: it is the largest of the packages that are imported
    if torch is None or torch.origin is None or torch.cached is None or sys.pycache_prefix is not None:
        return
    is_writable = os.access(Path(torch.origin).parent, os.W_OK) and not sys.dont_write_bytecode
    if is_writable or Path(torch.cached).exists():
        return
    try:
        kept = folder() / "bytecode"
        kept.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter: nobody's home
        return
    if os.access(kept, os.W_OK):
        sys.pycache_prefix = str(kept)
        os.environ["PYTHONPYCACHEPREFIX"] = str(kept)
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
