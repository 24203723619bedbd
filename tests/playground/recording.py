"""Records the playground for the README: `python -m tests.playground.recording [MODEL]` writes docs/playground.gif.

A chat, a burst under both kinds of scheduling, and the page of its timeline, which plays. At most 4 MB.
"""

import io
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.playground.picture import QUESTIONS
from tests.project.source import ROOT
from tests.serve.running import running
from tests.timeline.browser import chromium

if TYPE_CHECKING:
    from PIL.Image import Image
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1240, 900
MAX_BYTES = 4 * 2**20
FRAME_MS = 160


class Film:
    """Frames of a page with the time that each one is shown, in milliseconds."""

    def __init__(self) -> None:
        self.frames: list[tuple[Image, int]] = []

    def add(self, page: "Page", ms: int = FRAME_MS) -> None:
        """Add the page as it is now."""
        from PIL import Image

        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        self.frames.append((picture.quantize(64, dither=Image.Dither.NONE), ms))

    def follow(self, page: "Page", seconds: float) -> None:
        """Add frames of a page that changes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.add(page)

    def save(self, path: Path) -> None:
        """Write the film as a GIF."""
        pictures, times = zip(*self.frames, strict=True)
        pictures[0].save(
            path,
            save_all=True,
            append_images=pictures[1:],
            duration=list(times),
            loop=0,
            optimize=True,
        )
        assert path.stat().st_size <= MAX_BYTES, f"{path.stat().st_size} bytes; take fewer frames"


def main(model: str) -> None:
    """Write the recording."""
    film = Film()
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--no-log-requests")
    with (
        running(*flags, model=model) as server,
        chromium() as browser,
        TemporaryDirectory() as folder,
    ):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(f"{server.url}/")
        page.get_by_text("live", exact=True).wait_for()
        film.add(page, 1500)
        page.fill("#input", QUESTIONS[0])
        film.add(page, 1000)
        page.press("#input", "Enter")
        film.follow(page, 1.5)
        film.add(page, 2500)
        page.click("#burst")
        film.follow(page, 2.0)
        page.locator("#page:not(:disabled)").wait_for(timeout=120_000)
        film.add(page, 4000)
        with page.expect_download() as saved:
            page.click("#page")
        file = Path(folder) / "burst.html"
        saved.value.save_as(file)
        page.goto(file.as_uri())
        film.add(page, 2000)
        page.click("#play")
        film.follow(page, 6.0)
    film.save(ROOT / "docs" / "playground.gif")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
