"""The maximum length of completions, derived from the server's longest sequence."""

from typing import Any

import pytest

from bridge.config import SamplingConfig
from bridge.errors import UsageError
from bridge.rollouts.sampler import fit_completions
from tests.logged import logged


def fitted(longest: int | None, **choices: Any) -> tuple[int, list[str]]:
    with logged() as lines:
        return fit_completions(SamplingConfig(**choices), longest).longest, lines


@pytest.mark.parametrize(("longest", "expected"), [(256, 128), (511, 255), (32, 16), (1, 1)])
def test_default_length_is_shortened_to_fit_the_server(longest: int, expected: int) -> None:
    fitted_choices, (note,) = fitted(longest)
    assert fitted_choices == expected
    assert note == f"--max-new-tokens defaults to {expected}, half of the server's longest sequence of {longest} tokens"


@pytest.mark.parametrize("longest", [None, 512, 32_768])
def test_default_length_that_fits_is_kept(longest: int | None) -> None:
    assert fitted(longest) == (256, [])


def test_chosen_completion_length_is_kept_or_refused() -> None:
    assert fitted(256, max_new_tokens=255) == (255, [])
    for typed in (256, 300):  # the first is also the default
        with pytest.raises(UsageError, match=f"--max-new-tokens {typed} leaves no room for a prompt") as caught:
            fitted(256, max_new_tokens=typed)
        assert "--max-new-tokens 128" in caught.value.hint
