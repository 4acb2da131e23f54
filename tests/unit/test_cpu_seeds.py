"""Seeded requests whose prompt is prefilled in parts, on the CPU.

Not covered: that vLLM calls it (`tests/cpu/test_torn_tokens.py`, where every fence makes such requests).
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from patches import cpu_backend

ROOM = 8
"""Rows of the mask, of which a step fills the first few."""


class Runner:
    """vLLM's runner as far as sampling goes: a token of each request, and generators that it sets back."""

    def __init__(self, unfinished: list[bool], *, fails: bool = False) -> None:
        mask = np.ones(ROOM, dtype=bool)
        mask[: len(unfinished)] = unfinished
        self.discard_request_mask = SimpleNamespace(np=mask)
        generators = {index: torch.Generator().manual_seed(index) for index in range(len(unfinished)) if index != 1}
        self.input_batch = SimpleNamespace(num_reqs=len(unfinished), generators=generators)
        self.fails = fails

    def sample_tokens(self, grammar_output: Any) -> list[float]:
        assert grammar_output is None
        made = [
            torch.rand(1, generator=self.input_batch.generators.get(index)).item()
            for index in range(self.input_batch.num_reqs)
        ]
        if self.fails:
            raise ZeroDivisionError
        for index in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator = self.input_batch.generators.get(int(index))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return made


sample_tokens = cpu_backend.without_unfinished_prompts(Runner.sample_tokens)


def states(runner: Runner) -> dict[int, bytes]:
    return {index: each.get_state().numpy().tobytes() for index, each in runner.input_batch.generators.items()}


def test_vllm_alone_would_die_of_it() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        Runner([False, False, True]).sample_tokens(None)


def test_a_request_whose_prompt_goes_on_keeps_its_generator_as_it_was() -> None:
    runner = Runner([True, True, False, True])
    before = states(runner)
    sample_tokens(runner, None)
    after = states(runner)
    assert after.keys() == before.keys()
    assert [index for index in before if after[index] != before[index]] == [2]


def test_the_others_get_what_vllm_gives_them() -> None:
    runner, plain = Runner([False, True, False]), Runner([False, False, False])
    ours, theirs = sample_tokens(runner, grammar_output=None), plain.sample_tokens(None)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert states(runner) == states(plain)


def test_generators_are_back_after_an_error() -> None:
    runner = Runner([True, False], fails=True)
    with pytest.raises(ZeroDivisionError):
        sample_tokens(runner, None)
    assert list(runner.input_batch.generators) == [0]
