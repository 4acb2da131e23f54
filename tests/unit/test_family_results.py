"""The page of families is made of results, and is the one in the docs."""

from tests import family_results
from tests.family_results import PAGE, Result, page


def test_the_page_in_the_docs_is_the_one_that_the_results_make() -> None:
    assert PAGE.read_text() == page(family_results.load())


def test_a_row_tells_what_was_found() -> None:
    result = Result(
        transformers_class="A", vllm_class="B", together=("q k v",), before=0.01, after=0.02, moved=0.5, versions="v 1"
    )
    assert "| F | A | B | `q k v` | 0.0100 | 0.0200 | 0.5000 | v 1 |" in page({"F": vars(result)})
