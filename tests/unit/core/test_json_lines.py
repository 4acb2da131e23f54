"""Foreign JSON gives a document or a ValueError, whatever the text; and values that JSON cannot represent."""

import json

import pytest

from bridge.core import json_lines

LONG = "9" * 5000


BAD = ["{", "", "[" * 100_000, '{"a":' * 100_000, b"\xff", b'"\xff"', "NaNN", "1" * 5000 + "x"]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_invalid_document_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any subclass
        json_lines.parsed(text)


def test_integer_too_long_to_convert_stays_a_string() -> None:
    assert json_lines.parsed(f'{{"a": {LONG}, "b": -{LONG}, "c": 7, "d": 1.5}}') == {
        "a": LONG, "b": f"-{LONG}", "c": 7, "d": 1.5
    }  # fmt: skip


def test_integer_too_long_to_print_becomes_a_string() -> None:
    line = json_lines.line({"answer": 10**5000, "small": 10**4000})
    assert json.loads(line) == {"answer": hex(10**5000), "small": 10**4000}
