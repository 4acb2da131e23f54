"""Log requests that sample from another distribution than the trainer computes, once per set of fields.

Such a request may come from an Atropos environment, on any of vLLM's routes. The engine sees every request with the
model's own defaults filled in.
"""

import logging
from typing import Any

from bridge.rollouts.distribution import NO_DEFAULT, WHOLE, changes, in_words

PINS = """
vllm.v1.engine.async_llm: wrap async AsyncLLM.add_request(request_id, prompt, params)
vllm.config.model
    # What a request takes from generation_config.json: Bridge's own requests name all of it (`WHOLE`).
    ModelConfig.get_diff_sampling_param lists available_params: top_p, top_k, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, temperature, max_new_tokens, skip_special_tokens
"""
logger = logging.getLogger("vllm.bridge.sampling")


class SamplingWatch:
    """Wraps `add_request` of one engine client."""

    def __init__(self, engine: Any) -> None:
        self._logged: set[frozenset[str]] = set()
        self._add_request = engine.add_request
        engine.add_request = self.add_request

    async def add_request(self, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass a request on unchanged."""
        if getattr(params, "temperature", None):  # else it is greedy, or samples nothing
            self._look_at(params)
        return await self._add_request(request_id, prompt, params, *args, **kwargs)

    def _look_at(self, params: Any) -> None:
        changed = changes({name: getattr(params, name, None) for name in (*WHOLE, *NO_DEFAULT)})
        fields = frozenset(changed)
        if changed and fields not in self._logged:
            self._logged.add(fields)
            logger.warning(
                "Bridge: a request samples with %s if its completions are trained. The request asked for this, or"
                " left it to the model's generation_config.json. Further requests with the same fields are not logged.",
                in_words(changed),
            )
