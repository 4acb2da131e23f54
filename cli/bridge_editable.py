"""Let an editable install take precedence over folders named `bridge`; `make setup` copies this file to site-packages.

Setuptools' finder for an editable install comes after every folder on `sys.path`, and Python imports a folder without
`__init__.py`, such as a clone next to the user's program, as an empty package. A package or a module of that
name still takes precedence, as it does over an installed wheel.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OURS = "__editable___bridge_rl_"
"""Prefix of the name of setuptools' module."""


class BeforeFolders:
    """Finds Bridge's packages where `sys.path` has only folders of their names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None or not name.startswith("bridge"):
            return None
        finders = [one for one in sys.meta_path if getattr(one, "__module__", "").startswith(OURS)]
        ours = next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
        found = PathFinder.find_spec(name, path) if ours else None
        return ours if found is not None and found.origin is None else None


def install() -> None:
    """Put this finder first; `bridge_editable.pth` calls this function when Python starts."""
    sys.meta_path.insert(0, BeforeFolders)
