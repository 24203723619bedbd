"""The arena in a real browser, without a network: CONTRIBUTING.md says how to get the parts.

Run: `python -m pytest -n 0 -m browser tests/arena`
"""

import functools
import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.arena.built import real
from tests.course.solutions import SOLUTIONS
from tests.timeline.browser import AXE, SIZES, WatchedPage, browser, check_with_axe

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser"]  # a fixture
FIRST_PICTURE = 10.0  # seconds
LIMIT = 20.0  # seconds of a run, in python.js
ENDLESS = "while True:\n    pass\n"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    site = tmp_path_factory.mktemp("site")
    real(site / "arena")
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/arena/index.html"
        server.shutdown()


class Arena(WatchedPage):
    """The open page; a call of another host fails, and is a fault."""

    def __init__(self, browser: "Browser", size: str, address: str) -> None:
        super().__init__(browser, size)
        host = address.rpartition("/arena/")[0]
        self.page.route(lambda url: not url.startswith((host, "data:")), self._refuse)
        self.address = address

    def _refuse(self, route: object) -> None:
        self.faults.append(f"a call of another host: {route}")

    def open(self, view: str = "") -> "Page":
        self.page.goto(self.address + view)
        return self.page

    def wait_for(self, state: str, seconds: float = 60.0) -> None:
        self.page.wait_for_selector(f'body[data-state="{state}"]', timeout=1e3 * seconds)


@pytest.fixture(params=SIZES)
def arena(request: pytest.FixtureRequest, browser: "Browser", address: str) -> Iterator[Arena]:
    opened = Arena(browser, request.param, address)
    yield opened
    opened.context.close()
    assert opened.faults == []


def iterations(page: "Page") -> list[str]:
    frame = page.frame_locator("#picture")
    frame.locator("#rows2").wait_for()
    return frame.locator(".scheduler").all_inner_texts()


def test_the_first_picture_comes_soon_and_follows_an_edit(arena: Arena) -> None:
    begun = time.monotonic()
    page = arena.open()
    page.wait_for_selector("#picture:not([hidden])", timeout=60e3)
    assert iterations(page)[0] == "Orca: 16 requests, 95 iterations, 2.17 s"
    seconds = time.monotonic() - begun
    print(f"the first picture after {seconds:.1f} s")
    shared = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # other programs on the cores
    assert seconds < FIRST_PICTURE * shared
    field = page.get_by_label("Text of the first policy")
    field.fill(
        field.input_value().replace("rows = view.free_rows", "rows = min(1, view.free_rows)")
    )
    page.fill('[name="requests"]', "12")
    page.click("#run")
    page.frame_locator("#picture").get_by_text("Orca: 12 requests").wait_for()
    page.reload()
    assert "min(1, view.free_rows)" in page.get_by_label("Text of the first policy").input_value()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_second_policy_can_be_edited_too(arena: Arena) -> None:
    page = arena.open()
    page.get_by_label("Second policy", exact=True).select_option("sarathi")
    page.wait_for_selector("#picture:not([hidden])", timeout=60e3)
    page.click("#run")
    page.frame_locator("#picture").get_by_text("Sarathi: 16 requests").wait_for()
    page.click("#check")
    page.get_by_text("smallest case: ").wait_for()  # ORCA's policy, with a budget below a prompt


def test_an_endless_loop_is_stopped_by_the_button(arena: Arena) -> None:
    page = arena.open()
    arena.wait_for("ready")
    page.get_by_label("Text of the first policy").fill(ENDLESS)
    page.click("#run")
    arena.wait_for("running")
    assert page.evaluate("6 * 7") == 42  # the tab lives
    page.click("#stop")
    assert page.inner_text("#fault") == "stopped"
    page.get_by_role("button", name="Reset").first.click()
    page.click("#run")
    page.frame_locator("#picture").get_by_text("Orca: 16 requests").wait_for(timeout=60e3)


def test_an_endless_loop_ends_at_the_limit(arena: Arena) -> None:
    page = arena.open("#lab-1")
    arena.wait_for("ready")
    page.get_by_label("Your part").fill(ENDLESS)
    begun = time.monotonic()
    page.get_by_role("button", name="Run the check").click()
    page.get_by_text("the limit of a run").wait_for(timeout=1e3 * (LIMIT + 20))
    assert time.monotonic() - begun >= LIMIT
    arena.wait_for("ready")


@pytest.mark.parametrize("number", range(1, 6))
def test_a_lab_is_solved(number: int, browser: "Browser", address: str) -> None:
    arena = Arena(browser, "phone" if number == 3 else "desktop", address)
    page = arena.open(f"#lab-{number}")
    output = page.locator("#lab > .output")
    arena.wait_for("ready")
    page.get_by_role("button", name="Run the check").click()
    page.wait_for_selector("#lab > .output.bad", timeout=30e3)
    assert "Error" in output.inner_text()
    page.get_by_label("Your part").fill([*SOLUTIONS.values()][number - 1])
    page.get_by_role("button", name="Run the check").click()
    page.wait_for_selector("#lab > .output:not(.bad)", timeout=30e3)
    assert len(output.inner_text()) > 20
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    arena.context.close()
    assert arena.faults == []


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core")
@pytest.mark.parametrize("view", ["", "#lab-3"])
def test_the_page_is_accessible(view: str, browser: "Browser", address: str) -> None:
    arena = Arena(browser, "desktop", address)
    page = arena.open(view)
    arena.wait_for("ready")
    page.wait_for_selector("#picture:not([hidden])" if not view else "#lab textarea", timeout=60e3)
    page.add_script_tag(path=AXE)
    check_with_axe(page)
    arena.context.close()
    assert arena.faults == []


def test_the_limit_is_that_of_the_page() -> None:
    text = Path("scripts/arena/page/python.js").read_text(encoding="utf-8")
    assert f"LIMIT_SECONDS = {LIMIT:.0f};" in text
