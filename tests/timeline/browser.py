"""A real browser for the pages of the playground and of timelines: CONTRIBUTING.md says how to get the parts."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.project.source import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = ROOT / ".browser" / "package" / "axe.min.js"
SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1440, "height": 900}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "is_mobile": True,
        "has_touch": True,
        "device_scale_factor": 2,
    },
}


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A started browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with chromium() as started:
        yield started


class WatchedPage:
    """A page with a record of its faults."""

    def __init__(self, browser: "Browser", size: str, **options: Any) -> None:
        self.is_phone = size == "phone"
        self.context = browser.new_context(**SIZES[size], **options)
        self.page: Page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console", lambda line: self.faults.append(line.text) if line.type == "error" else None
        )


def count_colors(width: int, height: int) -> str:
    """A script: the number of colours in the upper left part of a canvas."""
    data = f"canvas.getContext('2d').getImageData(0, 0, {width}, {height}).data"
    return f"canvas => new Set(new Uint32Array({data}.buffer)).size"


def check_with_axe(page: "Page") -> None:
    """Check that axe, which the page has loaded, finds no serious fault."""
    found = page.evaluate("axe.run()")
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    assert not [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in serious]
    assert len(found["passes"]) > 20
