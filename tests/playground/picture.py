"""Takes the pictures of the README: `python -m tests.playground.picture [MODEL]` writes docs/playground*.png.

They show an answer with the alternatives of a token, and a burst under both kinds of scheduling.
"""

import io
import sys
from typing import TYPE_CHECKING, Literal

from tests.project.source import ROOT
from tests.serve.running import Server, running
from tests.timeline.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUESTIONS = ("How many days are in a week?", "Write a short list of three fruits.")
FILES: dict[Literal["light", "dark"], str] = {
    "light": "playground.png",
    "dark": "playground-dark.png",
}
WIDTH, HEIGHT, SCALE = 1240, 880, 1.5


def take_picture(browser: "Browser", server: Server, scheme: Literal["light", "dark"]) -> bytes:
    """Ask the questions, send a burst, and return the picture of the page."""
    viewport = {"width": WIDTH, "height": HEIGHT}
    context = browser.new_context(viewport=viewport, device_scale_factor=SCALE, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{server.url}/")
    page.get_by_text("live", exact=True).wait_for()
    page.click("#parameters summary")
    page.fill("#fields [name=temperature]", "0")
    page.click("#parameters summary")
    for number, question in enumerate(QUESTIONS):
        page.fill("#input", question)
        page.press("#input", "Enter")
        page.locator(".message:not(.user)").nth(number).get_by_text("Regenerate").wait_for(
            timeout=60_000
        )
        page.locator(".message:not(.user)").nth(number).locator(
            ".stats", has_text="tokens/s"
        ).wait_for()
    send_burst(page)
    page.get_by_role("button", name="Tokens", exact=True).first.click()
    page.locator(".message:not(.user)").first.locator(".token").nth(2).click()
    # shows the merged batch of an early iteration
    page.locator("#rows").hover(position={"x": 63, "y": 70})
    picture = page.screenshot()
    context.close()
    return picture


def send_burst(page: "Page") -> None:
    """Send a burst of 16 requests, and wait for its comparison."""
    page.click("#burst")
    page.locator("#gain", has_text="estimated").wait_for(timeout=120_000)
    page.locator("#burst:not(:disabled)").wait_for(timeout=120_000)


def main(model: str) -> None:
    """Write both pictures."""
    from PIL import Image

    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--no-log-requests")
    with running(*flags, model=model) as server, chromium() as browser:
        for scheme, name in FILES.items():
            picture = Image.open(io.BytesIO(take_picture(browser, server, scheme)))
            # a third of the size
            picture.convert("RGB").quantize(128).save(ROOT / "docs" / name, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
