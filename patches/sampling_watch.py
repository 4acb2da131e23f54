"""Log a request that samples from another distribution than the trainer computes, once for each such set of fields.

It may come from an Atropos environment, by any of vLLM's routes. The engine sees every request with the model's own
defaults filled in.

Not covered: changing a request; what `/generate` and Bridge's rollouts ask for (`bridge/rollouts/distribution.py`).
"""

import logging
from typing import Any

from bridge.rollouts.distribution import NO_DEFAULT, WHOLE, changes, in_words

logger = logging.getLogger("vllm.bridge.sampling")


class SamplingWatch:
    """Stands before `add_request` of one engine client."""

    def __init__(self, engine: Any) -> None:
        self._told: set[frozenset[str]] = set()
        self._add_request = engine.add_request
        engine.add_request = self.add_request

    async def add_request(self, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass a request on, unchanged."""
        self._look_at(params)
        return await self._add_request(request_id, prompt, params, *args, **kwargs)

    def _look_at(self, params: Any) -> None:
        if not getattr(params, "temperature", None):  # greedy, or not sampled at all
            return
        changed = changes({name: getattr(params, name, None) for name in (*WHOLE, *NO_DEFAULT)})
        fields = frozenset(changed)
        if changed and fields not in self._told:
            self._told.add(fields)
            logger.warning(
                "Bridge: a request samples with %s if its completions are trained. The request asked for this, or"
                " left it to the model's generation_config.json. Further requests with the same fields are not logged.",
                in_words(changed),
            )
