"""Log requests that sample from another distribution than the trainer assumes, once per set of fields.

They may come from an Atropos environment, on any of vLLM's routes. The engine sees every request with the model's
defaults filled in.
"""

import logging
from functools import wraps
from typing import Any

from bridge.rollouts.distribution import NO_DEFAULT, WHOLE, changes, in_words
from bridge_patches.engine_outputs import FILTERED

PINS = """
vllm.v1.engine.async_llm: wrap async AsyncLLM.add_request(request_id, prompt, params)
vllm.config.model
    # What a request takes from generation_config.json: Bridge's own requests name all of it (`WHOLE`).
    ModelConfig.get_diff_sampling_param lists available_params: top_p, top_k, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, temperature, max_new_tokens, skip_special_tokens
"""
logger = logging.getLogger("vllm.bridge.sampling")


def watch(engine: Any) -> None:
    """Wrap `add_request` of one engine client."""
    add_request, logged = engine.add_request, set[frozenset[str]]()

    @wraps(add_request)
    async def watched(request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a temperature it is greedy, or samples nothing; a filtered rollout reports what was kept.
        if getattr(params, "temperature", None) and FILTERED not in request_id:
            changed = changes({name: getattr(params, name, None) for name in (*WHOLE, *NO_DEFAULT)})
            if changed and (fields := frozenset(changed)) not in logged:
                logged.add(fields)
                logger.warning(
                    "Bridge: a request samples with %s if its completions are trained. It asked for this, or left it"
                    " to the model's generation_config.json. Further requests with the same fields are not logged.",
                    in_words(changed),
                )
        return await add_request(request_id, prompt, params, *args, **kwargs)

    engine.add_request = watched
