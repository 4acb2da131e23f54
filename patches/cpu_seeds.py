"""Keep a seeded request that is prefilled in parts from killing the engine on the CPU.

Symptom: "RuntimeError: CPU Generator does not use offset", and the engine is dead. Many prompts at once, and a fence
while many requests run, compute more tokens than one step has room for.
Cause: vLLM samples a token for each request of the step, those too whose prompt is not at its end, drops the latter,
and sets their generators back by an offset, which only a GPU's generators have.
Why this is safe: such a request has no generator while the step samples. Its token, which is dropped, comes from the
common generator, and its own one is where it was.
Seen in vLLM 0.32, `vllm/v1/worker/gpu_model_runner.py`; `CPUModelRunner` inherits it.

Not covered: GPUs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def patch() -> None:
    """Wrap the sampling of the CPU's runner; once per process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.sample_tokens = without_unfinished_prompts(CPUModelRunner.sample_tokens)


def without_unfinished_prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` without the generators of requests whose token is dropped; unchanged if that was done before.

    They are dropped in the step that `execute_model` prepared before.
    """
    if hasattr(original, "bridge"):
        return original

    @wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        dropped = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        unused = {index: generators.pop(index) for index in dropped if index in generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(unused)

    sample_tokens.bridge = True  # type: ignore[attr-defined]
    return sample_tokens
