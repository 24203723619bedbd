"""Decisions of the playground in a real browser: bars of probabilities, and the iterations of a call."""

import re
from typing import TYPE_CHECKING

import pytest

from tests.playground.shown import Shown, server, shown, text_of
from tests.serve.running import Server
from tests.timeline.browser import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "server", "shown"]  # fixtures


def test_a_call_shows_its_bars_and_its_iterations(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    page.click("button[data-mode=decide]")
    assert not page.locator("#composer").is_visible()
    page.click("#ask")
    page.locator("#decided", has_text="iteration").wait_for()
    assert page.locator("#answers table").count() == 3
    assert page.locator("#answers tr").count() == 2 + 3 + 3
    assert text_of(page, "#answers h3") == "Something was damaged"
    for table in page.locator("#answers table").all():
        values = [float(text) for text in table.locator("td:nth-child(2)").all_inner_texts()]
        assert sum(values) == pytest.approx(1, abs=0.002)
    found = re.match(r"(\d+) tokens: the state once", text_of(page, "#decided"))
    assert found is not None and int(found[1]) > 100
    shown.show("engine")
    page.locator("#rows").focus()
    page.keyboard.press("End")
    assert "Reads of call" in text_of(page, "#cell"), "all reads are one row"


def test_a_wrong_question_is_said(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    page.click("button[data-mode=decide]")
    page.fill("#questions", "Which? | a | a")
    shown.faults.clear()
    page.click("#ask")
    page.locator("#decided.error", has_text="two entries are equal").wait_for()
    assert page.locator("#answers table").count() == 0
    shown.faults = [fault for fault in shown.faults if "400" not in fault]
    page.click("button[data-mode=chat]")
    assert page.locator("#composer").is_visible() and not page.locator("#decide").is_visible()


@pytest.mark.parametrize("width", [1240, 320])
def test_nothing_is_cut(browser: "Browser", server: Server, width: int) -> None:
    shown = Shown(browser, "desktop" if width > 820 else "phone")
    shown.page.set_viewport_size({"width": width, "height": 800})
    page = shown.open(server.url)
    page.click("button[data-mode=decide]")
    page.click("#ask")
    page.locator("#decided", has_text="iteration").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#decide").evaluate("each => each.scrollWidth <= each.clientWidth")
    heights = page.locator("#answers tr").evaluate_all(
        "rows => rows.map((row) => row.clientHeight)"
    )
    assert max(heights) < 30, "each option is one line"
    shown.context.close()
