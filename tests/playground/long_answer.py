"""Measure a long answer in the playground: `python -m tests.playground.long_answer`, on a machine without other work.

A scripted server sends 5,000 tokens of Markdown at 200/s, with alternatives as the real one. Prints the tokens per
second that a MutationObserver sees, and the share of time in which the page's main thread was busy. The last line is
JSON.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from orca_jax.serve.playground.page import page_routes
from tests.timeline.browser import chromium

TOKENS, RATE, PART = 5000, 200, 1000
SETTINGS = {
    "model": "scripted", "context": 8192, "has_chat": True, "defaults": {}, "max_logprobs": 5, "scheduler": "orca",
    "max_num_seqs": 8, "machine": "", "examples": {"chat": [], "prompt": []},
}  # fmt: skip
WATCH = """() => {
  const body = document.querySelector(".message:not(.user) .body");
  window.seen = []; // [time, number of the last token on the page]
  new MutationObserver(() => {
    const numbers = (body.lastElementChild?.textContent ?? "").match(/w\\d+/g);
    if (numbers) window.seen.push([performance.now(), Number(numbers.at(-1).slice(1))]);
  }).observe(body, { childList: true, subtree: true, characterData: true });
}"""


def text_of(number: int) -> str:
    """A token of Markdown: paragraphs of 60 words with bold ones, lists of 20, and blocks of code of 40 lines."""
    word, place = f"w{number}", number % 300
    if place < 120:
        return (
            f"{word}.\n\n" if place % 60 == 59 else f"**{word}** " if place % 7 == 3 else f"{word} "
        )
    if place < 180:
        return (
            f"\n\n1. {word}" if place == 120 else f"\n1. {word}" if place % 3 == 0 else f" {word}"
        )
    if place == 180:
        return f"\n\n```python\n{word}"
    return f" {word}\n```\n\n" if place == 299 else f"\n{word}" if place % 3 == 0 else f" {word}"


def event(number: int) -> bytes:
    text = text_of(number)
    others = [{"token": f"other{n}", "logprob": -2.5 - n, "bytes": []} for n in range(4)]
    drawn = {"token": text, "logprob": -0.3, "bytes": []}
    logprobs = {"content": [{**drawn, "top_logprobs": [drawn, *others]}]}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "logprobs": logprobs}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


async def chat(request: Request) -> StreamingResponse:
    async def events() -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(TOKENS):
            await asyncio.sleep(begun + number / RATE - loop.time())
            yield event(number)
        usage = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()

    return StreamingResponse(events(), media_type="text/event-stream")


async def settings(request: Request) -> JSONResponse:
    return JSONResponse(SETTINGS)


async def iterations(request: Request) -> StreamingResponse:
    async def silence() -> AsyncIterator[bytes]:
        yield b": nothing\n\n"
        while not await request.is_disconnected():
            await asyncio.sleep(1)

    return StreamingResponse(silence(), media_type="text/event-stream")


def measure() -> dict[str, Any]:
    routes = [
        *page_routes(),
        Route("/playground/settings", settings),
        Route("/playground/iterations", iterations),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    samples: list[tuple[float, float, int]] = []  # seconds, busy seconds, tokens on the page
    with chromium() as browser:
        while not server.started:
            pass
        (socket,) = server.servers[0].sockets
        page = browser.new_page(viewport={"width": 1240, "height": 880})
        page.goto(f"http://127.0.0.1:{socket.getsockname()[1]}/")
        page.get_by_text("live", exact=True).wait_for()
        page.fill("#input", "a long answer")
        page.press("#input", "Enter")
        page.locator(".message:not(.user)").wait_for()
        page.evaluate(WATCH)
        performance = page.context.new_cdp_session(page)
        performance.send("Performance.enable")
        while not samples or samples[-1][2] < TOKENS - 1:
            page.wait_for_timeout(500)
            found = {
                each["name"]: each["value"]
                for each in performance.send("Performance.getMetrics")["metrics"]
            }
            shown = page.evaluate("window.seen.at(-1)?.[1] ?? 0")
            samples.append((found["Timestamp"], found["TaskDuration"], shown))
        seen = page.evaluate("window.seen")
        blocks = page.evaluate("document.querySelector('.markdown').childElementCount")
    server.should_exit = True
    thread.join()

    def rate(first: int, last: int) -> float:
        part = [each for each in seen if first <= each[1] <= last]
        return round(1000 * (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]), 1)

    def busy(first: int, last: int) -> float:
        part = [each for each in samples if first <= each[2] <= last]
        return round((part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]), 3)

    return {
        "tokens": TOKENS,
        "sent_per_s": RATE,
        "shown_per_s": rate(0, TOKENS),
        "shown_per_s_last_1000": rate(TOKENS - PART, TOKENS),
        "changes_per_s": round(1000 * len(seen) / (seen[-1][0] - seen[0][0]), 1),
        "busy": busy(0, TOKENS),
        "busy_by_1000": [busy(first, first + PART) for first in range(0, TOKENS, PART)],
        "blocks": blocks,
    }


if __name__ == "__main__":
    result = measure()
    for key, value in result.items():
        print(f"{key:24}{value}")
    print(json.dumps(result))
