"""The general plugin: vLLM calls `register` in each of its processes, possibly more than once.

Nothing is imported at the top: vLLM swallows an exception raised while a plugin is *loaded*, and stops at one raised
inside the function.
"""

import functools
import os

PINS = """
vllm.plugins
    DEFAULT_PLUGINS_GROUP = 'vllm.general_plugins'  # our entry point's group
    call load_general_plugins()  # in every process
vllm.envs: environment_variables
vllm.entrypoints.cli.main: call main()  # `python -m vllm.entrypoints.cli.main serve` is the server we start
"""
ENABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
VARIABLES = (ENABLE, "VLLM_SKIP_WEIGHT_DAEMON")
"""Bridge's own, although they are named like vLLM's."""


@functools.cache
def register() -> None:
    """Patch this process's vLLM, if `VLLM_ENABLE_SHARED_WEIGHTS=1` and it fits; later calls do nothing."""
    if os.environ.get(ENABLE, "0").lower() not in {"1", "true"}:
        return
    from bridge_patches import (
        compatibility,
        engine_outputs,
        loading,
        memory_pool,
        model_runner,
        prefix_cache,
        tether,
        thresholds,
    )

    compatibility.check_installed()
    from vllm import envs

    for name in VARIABLES:  # or vLLM warns at startup that it does not know them
        envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))
    tether.tie()
    for patched in (loading, model_runner, memory_pool, prefix_cache, engine_outputs, thresholds):
        patched.patch()
