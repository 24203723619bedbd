"""The playground in a browser, for tests/playground: a server, and the page on a desktop and on a phone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.serve.running import Server, running
from tests.timeline.browser import SIZES, WatchedPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MODEL = "preset:clock-10"  # an iteration takes 10 ms


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-num-seqs", "8", "--max-model-len", "512", model=MODEL) as started:
        yield started


class Shown(WatchedPage):
    """The playground in a browser."""

    def show(self, pane: str) -> None:
        """Bring a half of the page to the front; a desktop shows both."""
        if self.is_phone:
            self.page.tap(f"button[data-pane={pane}]")

    def open(self, url: str) -> "Page":
        self.page.goto(f"{url}/")
        self.page.get_by_text("live", exact=True).wait_for()
        return self.page

    def ask(self, text: str, max_tokens: int = 16) -> None:
        self.page.locator("#fields [name=max_tokens]").evaluate(
            "(field, value) => { field.value = value; field.dispatchEvent(new Event('input', {bubbles: true})) }",
            str(max_tokens),
        )
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def show_tokens(self) -> None:
        """Show the tokens of the first answer instead of its Markdown."""
        self.page.get_by_role("button", name="Tokens", exact=True).first.click()

    def wait_for_answer(self, number: int = 0) -> None:
        self.page.locator(".message:not(.user)").nth(number).get_by_text("Regenerate").wait_for()


@pytest.fixture(params=SIZES)
def shown(request: pytest.FixtureRequest, browser: "Browser") -> Iterator[Shown]:
    shown = Shown(browser, request.param)
    yield shown
    shown.context.close()
    assert shown.faults == []


def text_of(page: "Page", selector: str) -> str:
    return page.locator(selector).first.inner_text()
