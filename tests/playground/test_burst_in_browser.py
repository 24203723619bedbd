"""Bursts of the playground in a real browser, on a desktop and on a phone: CONTRIBUTING.md says how to get the parts.

Run: `python -m pytest -n 0 -m browser tests/playground`
"""

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_jax.timeline.spans import request_spans
from tests.playground.shown import Shown, server, shown, text_of
from tests.sched.lab import Lab
from tests.serve.running import Server, wait_until
from tests.timeline.browser import browser, count_colors
from tests.timeline.test_live import WatchedLab
from tests.timeline.traced import ONE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "server", "shown"]  # fixtures


def test_a_burst_and_its_replay(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.show("engine")
    assert text_of(page, "#gain") == "Send a burst to compare two kinds of scheduling."
    page.click("#burst")
    wait_until(lambda: int(text_of(page, "[data-figure=running]")) > 1)
    page.locator("#burst:not(:disabled)").wait_for()
    page.locator("#gain", has_text="estimated").wait_for()
    mean = r"(\d+) iterations, an answer after (\d+)"
    numbers = re.search(
        rf"This engine: {mean} .*Request-level scheduling: {mean}", text_of(page, "#result")
    )
    assert numbers is not None
    here, mean_here, there, mean_there = (int(number) for number in numbers.groups())
    time = r"([\d.]+) (s|ms)"
    gain = re.fullmatch(
        rf"An answer after {time} instead of {time} \(estimated\)", text_of(page, "#gain")
    )
    assert gain is not None and there > here and mean_there > mean_here
    basis = text_of(page, "#basis")
    assert ("less than half of the iterations" in basis) == (here / there < 0.5)
    assert "these are computed in this page" in basis
    assert float(text_of(page, "[data-figure=tokens]")) > 0, "the figures of the burst stay"
    assert text_of(page, "#engine-title") == "Engine, figures of the burst"
    batch = re.match(
        r"the fullest, iteration \d+: \d+ tokens of (\d+) requests", text_of(page, "#batch-text")
    )
    assert batch is not None and int(batch[1]) > 1, "the fullest batch stays"
    assert text_of(page, "#live-title") == "Iteration-level scheduling, this engine (chunked)"
    assert "none takes the place" not in text_of(page, "#result")
    first = page.evaluate("document.querySelector('#replay').getBoundingClientRect().bottom")
    assert first < page.viewport_size["height"], "the result needs a scroll"
    assert page.url.endswith("/#burst=16&seed=1")
    pixels = count_colors(900, 400)
    assert all(
        page.locator(canvas).evaluate(pixels) > 20 for canvas in ("#rows", "#replay", "#batch")
    )
    page.focus("#rows")
    page.keyboard.press("ArrowUp")
    assert re.match(r"Request \d+, iteration \d+: ", text_of(page, "#cell"))
    page.click("#table-part summary")
    page.locator("#table tr", has_text="ended (length)").nth(15).wait_for()


def test_a_pause_ends_the_watch(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.show("engine")
    page.click("#pause")
    assert text_of(page, "#state") == "paused" and text_of(page, "#pause") == "Resume"
    page.click("#pause")
    page.get_by_text("live", exact=True).wait_for()


def test_a_burst_can_be_saved_and_opened_again(
    shown: Shown, server: Server, tmp_path: Path
) -> None:
    page = shown.page
    page.goto(f"{server.url}/#burst=12&seed=5")
    page.get_by_text("a burst of 12 requests (seed 5)").wait_for()
    page.click("#burst")
    page.locator("#picture:not(:disabled)").wait_for()
    assert "12 requests (seed 5)" in text_of(page, "#result")
    with page.expect_download() as picture:
        page.click("#picture")
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as saved:
        page.click("#page")
    file = tmp_path / "burst.html"
    saved.value.save_as(file)
    page.goto(file.as_uri())
    assert page.locator("tbody tr").count() == 12 and "12 requests" in text_of(page, ".scheduler")
    assert re.match(r"Request \d+, iteration \d+: ", text_of(page, "#cell")), (
        "it opens at the fullest iteration"
    )


SHAPES: dict[str, dict[str, Any]] = {
    "preempted": {},
    "ends late": {"depth": 2},
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_page_has_the_spans_of_the_timeline(
    browser: "Browser", server: Server, case: str
) -> None:
    """Requests that wait, are recomputed, end late: the page's spans against `request_spans`."""
    shape = ONE._replace(**{"budget": 6, "num_pages": 8, **SHAPES[case]})
    lab = WatchedLab(max_bs=3, page_size=2, shape=shape, eos=(43,) if case == "ends late" else ())
    lines = lab.watch()
    for name, prompt, generated in (("A", 3, 6), ("B", 5, 7), ("C", 2, 4), ("D", 9, 2)):
        lab.add(name, prompt, generated)
    lab.run()
    shown = Shown(browser, "desktop")
    page = shown.open(server.url)
    script = """async (lines) => {
      const timeline = new (await import("/playground/timeline.js")).Timeline();
      for (const line of lines) timeline.take(line);
      const of = ({ kind, first, last, tokens }) => [kind, first, last, tokens];
      return [...timeline.requests.values()].map((each) => [each.state, each.generated, each.spans.map(of)]);
    }"""
    found = page.evaluate(script, lines)
    run = lab.timeline
    every = [span for spans in request_spans(run).values() for span in spans]
    happened = {
        "preempted": any(iteration.preempted for iteration in run.iterations),
        "ends late": any(span.kind == "repeat" for span in every),
    }
    assert happened[case]
    for (state, generated, spans), (n, expected) in zip(
        found, request_spans(run).items(), strict=True
    ):
        assert (state, generated) == ("ended", run.ends[n].generated)
        assert spans == joined(
            [(each.kind, each.first, each.last, each.tokens) for each in expected]
        )
    again = page.evaluate(script, [*lines, {"start": {**lines[0]["start"], "num_arrived": 0}}])
    assert again == [], "another engine counts from 0"
    shown.context.close()


def joined(spans: list[tuple[str, int, int, int]]) -> list[list[Any]]:
    """Waits for different reasons joined, and spans of admitted requests without work left out."""
    result: list[list[Any]] = []
    for kind, first, last, tokens in spans:
        if (
            result
            and result[-1][0] == kind
            and result[-1][2] == first - 1
            and kind in ("waiting", "preempted")
        ):
            result[-1][2] = last
        elif kind != "idle":
            result.append([kind, first, last, tokens])
    return result


def test_the_replay_is_that_of_the_scheduler(browser: "Browser", server: Server) -> None:
    """The page's rule against `RequestLevelScheduler` on random bursts."""
    shown = Shown(browser, "desktop")
    page = shown.open(server.url)
    draws = random.Random(5)
    for _ in range(20):
        size = draws.randrange(1, 5)
        requests = [
            (draws.randrange(1, 9), draws.randrange(1, 9)) for _ in range(draws.randrange(1, 12))
        ]
        lab = Lab("request_level", max_bs=size, n_slots=1000)
        ends: dict[str, int] = {}
        for number, request in enumerate(requests):
            lab.add(str(number), *request)
        while lab.engine.has_work:
            for update in lab.engine.step():
                if update.finish_reason is not None:
                    ends[update.request_id] = lab.engine.stats.iterations
        script = "async ([lengths, size]) => (await import('/playground/replay.js')).requestLevel(lengths, size)"
        replay = page.evaluate(script, [requests, size])
        assert [row["end"] for row in replay["rows"]] == [
            ends[str(i)] for i in range(len(requests))
        ]
        assert replay["total"] == lab.engine.stats.iterations
    shown.context.close()
