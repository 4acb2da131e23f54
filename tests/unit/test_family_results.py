"""The page of families is generated from the results, and the docs are up to date."""

from tests import family_results
from tests.family_results import PAGE, Result, page


def test_the_page_in_the_docs_is_the_one_that_the_results_make() -> None:
    assert PAGE.read_text() == page(*map(family_results.load, ("cpu", "gpu", "parts")))


def test_a_row_tells_what_was_found() -> None:
    result = Result(
        transformers_class="A", vllm_class="B", together=("q k v",), before=0.01, after=0.02, moved=0.5, versions="v 1",
        num_parameters=123_000_000,
    )  # fmt: skip
    on_cpu, on_gpu = page({"F": vars(result)}, {}, {"F": {"2": 4e-6}}), page({}, {"F": vars(result)}, {})
    assert "| F | A | B | `q k v` | 0.0100 | 0.0200 | 0.5000 | 4e-06 | - | v 1 |" in on_cpu
    assert "| F | 123,000,000 | 0.0100 | 0.0200 | 0.5000 | v 1 |" in on_gpu
    assert "GPU" not in on_cpu
