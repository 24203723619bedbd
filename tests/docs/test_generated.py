"""Pages and parts of pages that a program writes have the text that it would write now."""

import pytest

from lab.pages.command import pages
from lab.pages.markdown import Page, between, escaped, line, table
from scripts import api_page, flags_page
from tests.docs import metrics_table
from tests.model import page as models_page
from tests.serve import conformance

GENERATED = (
    *flags_page.PAGES,
    api_page.PAGE,
    conformance.PAGE,
    metrics_table.PAGE,
    models_page.PAGE,
    *pages(),
)


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: f"{page.path.name} by {page.command}")
def test_a_page_is_current(page: Page) -> None:
    assert not page.is_old(), f"run: {page.command}"


def test_text_between_marks_is_replaced_and_the_rest_stays() -> None:
    assert between("a <b> old <e> c", "<b>", "<e>", " new ") == "a <b> new <e> c"
    for text in ("a <e> c", "a <b> c", "a <e> <b> c"):
        with pytest.raises(ValueError, match="no <b> and <e>"):
            between(text, "<b>", "<e>", "")


def test_a_cell_does_not_end_its_row() -> None:
    assert escaped("a |\n b") == r"a \| b"
    assert line(["a", ""]) == "| a |  |\n"
    assert table(("x", "y"), [("1", "2")]) == "| x | y |\n|---|---|\n| 1 | 2 |\n"
