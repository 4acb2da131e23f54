"""Code that runs inside vLLM: two plugins, a worker extension, and the patches that they apply.

`plugin.py` patches each of vLLM's processes, `worker.py` exports and inspects one rank's weights, and `routes.py` adds
`/bridge/*` to the API server. Each file pins what it needs of vLLM in `PINS` (`pins.py`).

May import: vLLM, and of `bridge` the errors, `core`, `server`, `weights`, `passes.layers` and
`rollouts.distribution`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

Wrapper = Callable[..., Any]


def wrap(owner: Any, name: str) -> Callable[[Wrapper], Wrapper]:
    """Replace the method or function `owner.name` with the decorated one, which gets the original as first argument."""
    original = getattr(owner, name)

    def install(wrapper: Wrapper) -> Wrapper:
        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        return wrapper

    return install
