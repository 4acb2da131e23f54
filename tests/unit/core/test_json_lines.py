"""JSON of others: whatever the text, a document or a ValueError; and what JSON cannot hold."""

import json

import pytest

from bridge.core import json_lines

LONG = "9" * 5000


BAD = ["{", "", "[" * 100_000, '{"a":' * 100_000, b"\xff", b'"\xff"', "NaNN", "1" * 5000 + "x"]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_invalid_document_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any kind
        json_lines.parsed(text)


def test_an_integer_that_python_cannot_convert_is_text() -> None:
    assert json_lines.parsed(f'{{"a": {LONG}, "b": -{LONG}, "c": 7, "d": 1.5}}') == {
        "a": LONG, "b": f"-{LONG}", "c": 7, "d": 1.5
    }  # fmt: skip


def test_an_integer_that_python_cannot_print_becomes_text() -> None:
    line = json_lines.line({"answer": 10**5000, "small": 10**4000})
    assert json.loads(line) == {"answer": hex(10**5000), "small": 10**4000}
