"""The text of each token: found if it stands for one token, reported if it stands for several or none."""

from pathlib import Path
from typing import Any

import pytest

from bridge.rollouts.openai_api import ids_by_text
from bridge.weights import skeleton
from tests.models import tiny


class Counting:
    """A vocabulary of a word, two halves of one character, and a word again; counts calls."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def __len__(self) -> int:
        return 4

    def decode(self, ids: list[int], **_: Any) -> str:
        self.num_decoded += 1
        return [" a", "\ufffd", "\ufffd", "a"][ids[0]]


def test_every_token_is_found_by_its_text(tmp_path: Path) -> None:
    tokenizer = skeleton.tokenizer(str(tiny.write(tiny.llama(), tmp_path / "model")))
    ids_of = ids_by_text(tokenizer)
    assert [ids_of(tokenizer.decode([token_id])) for token_id in range(tiny.VOCABULARY)] == [
        (token_id,) for token_id in range(tiny.VOCABULARY)
    ]


@pytest.mark.parametrize(("text", "ids"), [(" a", (0,)), ("a", (3,)), ("\ufffd", (1, 2)), ("b", ()), ("", ())])
def test_a_text_may_stand_for_one_token_several_or_none(text: str, ids: tuple[int, ...]) -> None:
    assert ids_by_text(Counting())(text) == ids


def test_the_vocabulary_is_decoded_once_at_the_first_lookup() -> None:
    tokenizer = Counting()
    ids_of = ids_by_text(tokenizer)
    assert tokenizer.num_decoded == 0
    for text in ("a", "b", " a"):
        ids_of(text)
    assert tokenizer.num_decoded == 4
