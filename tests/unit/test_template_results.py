"""The page of chat templates is up to date."""

from tests import template_results
from tests.template_results import PAGE, page, results


def test_template_page_is_current_and_explains_losses() -> None:
    found = results()
    assert len(found) >= 30
    assert PAGE.read_text() == page(found), "python -m tests.template_results writes it"
    told = {"refused", "noted", "split"}
    for name, one in found.items():
        cells = dict(zip(template_results.COLUMNS[1:], one.cells, strict=True))
        silent = [column for column, cell in cells.items() if cell in told and not one.said.get(column)]
        assert silent == [], name
