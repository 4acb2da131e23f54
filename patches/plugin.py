"""The general plugin: vLLM calls `register` in every one of its processes, perhaps more than once.

Nothing is imported at the top: vLLM swallows an exception raised while a plugin is *loaded*, and
stops at one raised inside the function.

Not covered: HTTP routes (`routes.py`).
"""

import os

ENABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
VARIABLES = (ENABLE, "VLLM_SKIP_WEIGHT_DAEMON")
"""Ours, although their names begin as vLLM's own do."""


def register() -> None:
    """Patch this process's vLLM, if shared weights are asked for by `VLLM_ENABLE_SHARED_WEIGHTS=1`.

    Raises:
        IncompatibleVersionError: the installed vLLM is outside the range, or a patched symbol differs.
    """
    if os.environ.get(ENABLE, "0").lower() not in {"1", "true"}:
        return
    from patches import compatibility, loading, logprobs_wire, memory_pool, model_runner, prefix_cache, tether

    compatibility.check_installed()
    _introduce_variables()
    tether.tie()
    loading.patch()
    model_runner.patch()
    memory_pool.patch()
    prefix_cache.patch()
    logprobs_wire.patch()


def _introduce_variables() -> None:
    """Add our variables to those that vLLM knows, or it warns at its start that it does not know them."""
    from vllm import envs

    for name in VARIABLES:
        envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))
