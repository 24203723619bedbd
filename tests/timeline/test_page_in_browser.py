"""The page of a timeline in a real browser, from a file: CONTRIBUTING.md says how to get the parts.

Run: `python -m pytest -n 0 -m browser tests/timeline`
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_jax.timeline.html import html_page
from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.writer import Arrival, End, IterationRecord
from tests.timeline.browser import AXE, SIZES, WatchedPage, browser, check_with_axe, count_colors
from tests.timeline.test_page import HOSTILE
from tests.timeline.traced import ONE, TracedLab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser"]  # a fixture
ITERATIONS, ROWS = 10_000, 200


@pytest.fixture(scope="module")
def small() -> Timeline:
    lab = TracedLab(max_bs=4, page_size=4, shape=ONE._replace(budget=16, num_pages=40, depth=2))
    for n in range(12):
        lab.add(HOSTILE if n == 1 else f"r{n}", 3 + 2 * n, 20 - n)
    lab.run()
    return lab.timeline


@pytest.fixture(scope="module")
def large(small: Timeline) -> Timeline:
    """Requests of 100 to 1,500 tokens in 200 rows; each begins when another one has ended."""
    run = Timeline(replace(small.head, buckets=()))
    live: dict[int, int] = {}  # request -> its number of tokens so far
    for index in range(ITERATIONS):
        now = index * 0.01
        chunks = []
        while len(live) < ROWS:
            n = len(run.arrivals)
            run.arrivals[n] = Arrival(n, f"r{n}", now, 20, 100 + 7 * (n % ROWS))
            live[n] = 0
            chunks.append((n, 0, 20, True))
        increments = [(n, 19 + count) for n, count in live.items() if count]
        tokens = len(increments) + 20 * len(chunks)
        times = {
            "selected": now,
            "planned": now + 1e-4,
            "submitted": now + 2e-4,
            "collected": now + 9e-3,
            "device": 8e-3,
        }
        run.iterations.append(
            IterationRecord(index, increments=increments, chunks=chunks, repeats=[], preempted=[], tokens=tokens,
                            padding=0, launches=1, running=ROWS, waiting=0, held=None, free_pages=9, **times)
        )  # fmt: skip
        for n in list(live):
            live[n] += 1
            if live[n] == run.arrivals[n].max_tokens:
                run.ends[n] = End(n, now + 9.5e-3, "length", live.pop(n), 0, [])
    return run


class Opened(WatchedPage):
    """The page of a timeline; its calls are faults too."""

    def __init__(self, browser: "Browser", size: str, file: Path, **options: Any) -> None:
        super().__init__(browser, size, **options)
        self.page.on(
            "request",
            lambda call: self.faults.append(call.url) if call.url != file.as_uri() else None,
        )
        self.page.goto(file.as_uri())

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")

    def choose(self, x: float, y: float) -> None:
        """Tap or point at a place of the chart."""
        act = self.page.tap if self.is_phone else self.page.hover
        act("#rows", position={"x": x, "y": y})

    def frames(self, script: str) -> None:
        """Run a script, then wait until it is drawn."""
        frames = "for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);"
        self.page.evaluate(f"async () => {{ {script}; {frames} }}")


@pytest.fixture(params=SIZES)
def opened(
    request: pytest.FixtureRequest, browser: "Browser", small: Timeline, tmp_path: Path
) -> Iterator[Opened]:
    file = tmp_path / "timeline.html"
    file.write_text(html_page(small), encoding="utf-8")
    opened = Opened(browser, request.param, file)
    yield opened
    opened.context.close()
    assert opened.faults == []


COLORS = count_colors(700, 300)


def test_a_cell_has_its_details_by_pointer_touch_and_keys(opened: Opened, small: Timeline) -> None:
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page scrolls sideways"
    )
    assert (
        page.locator("#rows").evaluate(COLORS) > 10 and page.locator("#batch").evaluate(COLORS) > 10
    )
    opened.choose(50, 70)
    assert (
        opened.text("cell")
        == "Request 0, iteration 0: prefill (initiation), 3 tokens from position 0."
    )
    assert "r0" in opened.text("request") and "3 prompt tokens, 20 generated tokens" in opened.text(
        "request"
    )
    queue = r"16 tokens, 0 of padding, 1 launch; 4 running, 8 waiting \(the first one for rows\); \d+ pages free"
    assert re.search(
        f"Iteration 0 at 0.* s: {queue}; device .* ms, host .* ms", opened.text("iteration")
    )
    assert opened.text("batch-text") == "iteration 0: 16 tokens of 4 requests (4 chunks of prefill)"
    (page.tap if opened.is_phone else page.click)("#after")
    assert opened.text("cell").startswith(
        "Request 0, iteration 1: increment, one generated token at position 3"
    )
    page.focus("#rows")
    for key in ("ArrowDown", "End"):
        page.keyboard.press(key)
    last = small.iterations[-1].iteration
    assert opened.text("cell") == f"Request 1, iteration {last}: ended before."
    assert HOSTILE.replace("\u2028", "") in opened.text("request").replace("\u2028", "")
    page.keyboard.press("Home")
    assert opened.text("cell").startswith("Request 1, iteration 0: ")


def test_zoom_and_seconds(opened: Opened) -> None:
    page = opened.page
    width = "document.getElementById('space').clientWidth"
    whole = page.evaluate(width)
    for _ in range(3):
        page.click("#in")
    opened.frames("")
    assert page.evaluate(width) > 2 * whole
    page.click("#fit")
    opened.frames("")
    assert abs(page.evaluate(width) - whole) <= 2
    page.click("[data-unit=seconds]")
    opened.frames("")
    assert page.locator("[data-unit=seconds]").get_attribute("aria-pressed") == "true"
    assert page.locator("#rows").evaluate(COLORS) > 10
    opened.choose(50, 70)
    assert opened.text("cell").startswith("Request 0, iteration 0: ")


def test_a_large_recording_draws_what_is_seen(
    browser: "Browser", large: Timeline, tmp_path: Path
) -> None:
    file = tmp_path / "large.html"
    file.write_text(html_page(large), encoding="utf-8")
    assert file.stat().st_size < 2_000_000
    opened = Opened(browser, "desktop", file)
    count = """() => { const canvas = CanvasRenderingContext2D.prototype, original = canvas.fillRect;
        canvas.fillRect = function (...all) { window.drawn++; original.apply(this, all); } }"""
    opened.page.evaluate(count)
    for share in (0.2, 0.5, 0.9):
        opened.frames(
            f"drawn = 0; const v = document.getElementById('view'); v.scrollLeft = {share} * v.scrollWidth"
        )
        assert 100 < opened.page.evaluate("drawn") < 20_000, "of 2,000,000 cells"
    assert opened.page.locator("#rows").evaluate("canvas => canvas.width") < 3000
    opened.page.click("#fit")
    opened.frames("drawn = 0; document.getElementById('view').dispatchEvent(new Event('scroll'))")
    assert 100 < opened.page.evaluate("drawn") < 60_000
    opened.choose(600, 200)
    assert re.match(r"Request \d+, iteration \d{4}: ", opened.text("cell"))
    assert opened.faults == []
    opened.context.close()


def test_without_scripts(browser: "Browser", small: Timeline, tmp_path: Path) -> None:
    file = tmp_path / "timeline.html"
    file.write_text(html_page(small), encoding="utf-8")
    opened = Opened(browser, "phone", file, java_script_enabled=False)
    assert "needs JavaScript" in opened.page.locator("noscript p").inner_text()
    assert opened.page.get_by_text("Time to first token").is_visible()
    assert opened.page.locator("tbody tr").count() == 12
    assert (
        not opened.page.locator("#view").is_visible()
        and not opened.page.locator("#in").is_visible()
    )
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_no_serious_fault(
    browser: "Browser", small: Timeline, tmp_path: Path, size: str, scheme: Any
) -> None:
    if not AXE.exists():
        pytest.skip("needs axe-core")
    file = tmp_path / "timeline.html"
    file.write_text(html_page(small), encoding="utf-8")
    opened = Opened(browser, size, file, color_scheme=scheme, bypass_csp=True)
    opened.choose(50, 70)
    opened.page.evaluate(AXE.read_text(encoding="utf-8"))
    check_with_axe(opened.page)
    opened.context.close()
