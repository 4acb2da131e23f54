"""The text of each token, for servers that tell tokens by their text alone.

Not covered: vocabularies that write a word's start as a sign of its own (sentencepiece): decoded alone, such a token
reads like the one without the sign, so that both are refused as unclear.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any


class Vocabulary:
    """A tokenizer's tokens by their decoded text; nothing is decoded before the first question."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the ids of all tokens that read as `text`."""
        return self._ids.get(text, ())

    @cached_property
    def _ids(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = defaultdict(tuple)
        for token_id in range(len(self._tokenizer)):
            found[self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)] += (token_id,)
        return dict(found)
