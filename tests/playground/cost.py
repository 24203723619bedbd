"""Measure the playground: `python -m tests.playground.cost [MODEL]`, on a machine without other work.

Sends bursts of 200 requests to a server, in turn without a page and with a page that draws them. Prints the tokens per
second of both, the processor time of the engine, and the frames per second of the page. The last line is JSON.
"""

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.serve.running import Server, running
from tests.timeline.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAIRS = 5
REQUESTS = [[16 + 7 * i % 81, 16 + 11 * i % 97] for i in range(200)]
TOKENS = sum(generated for _, generated in REQUESTS)
COUNT_FRAMES = """() => {
  window.frames_ = [];
  const frame = (now) => { window.frames_.push(now); requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}"""


def run_burst(server: Server, seed: int) -> dict[str, float]:
    """Tokens per second of one burst, and the engine's processor time."""
    engine = server.engine()
    before = sum(engine.cpu_times()[:2])
    start = time.monotonic()
    body = {"requests": REQUESTS, "seed": seed}
    server.http.post("/playground/burst", json=body, timeout=600).raise_for_status()
    seconds = time.monotonic() - start
    return {"tokens_per_s": TOKENS / seconds, "engine_cpu_s": sum(engine.cpu_times()[:2]) - before}


def frames_per_second(page: "Page") -> dict[str, float]:
    """The mean rate since the last call, and that of the slowest second."""
    times = page.evaluate("window.frames_.splice(0)")
    seconds = (times[-1] - times[0]) / 1000
    counts = [0] * (int(seconds) or 1)
    for at in times:
        counts[min(len(counts) - 1, int((at - times[0]) / 1000))] += 1
    return {"mean": (len(times) - 1) / seconds, "slowest": min(counts)}


def measure(model: str) -> dict[str, Any]:
    flags = ("--max-num-seqs", "200", "--max-model-len", "512", "--no-log-requests")
    alone: list[dict[str, float]] = []
    watched: list[dict[str, float]] = []
    frames: list[dict[str, float]] = []
    with running(*flags, model=model) as server, chromium() as browser:
        run_burst(server, 0)
        for pair in range(1, PAIRS + 1):
            alone.append(run_burst(server, 2 * pair))
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{server.url}/")
            page.get_by_text("live", exact=True).wait_for()
            page.evaluate(COUNT_FRAMES)
            page.wait_for_timeout(200)
            watched.append(run_burst(server, 2 * pair + 1))
            frames.append(frames_per_second(page))
            page.close()
            server.wait_idle()

    def median(rows: list[dict[str, float]], name: str) -> float:
        return round(statistics.median(row[name] for row in rows), 3)

    ratios = [
        two["tokens_per_s"] / one["tokens_per_s"] for one, two in zip(alone, watched, strict=True)
    ]
    return {
        "model": model,
        "requests": len(REQUESTS),
        "tokens_per_s_alone": median(alone, "tokens_per_s"),
        "tokens_per_s_watched": median(watched, "tokens_per_s"),
        "median_ratio": round(statistics.median(ratios), 4),
        "engine_cpu_s_alone": median(alone, "engine_cpu_s"),
        "engine_cpu_s_watched": median(watched, "engine_cpu_s"),
        "frames_per_s": median(frames, "mean"),
        "frames_in_slowest_s": min(row["slowest"] for row in frames),
    }


if __name__ == "__main__":
    result = measure(sys.argv[1] if len(sys.argv) > 1 else "preset:clock-20")
    for key, value in result.items():
        print(f"{key:24}{value}")
    print(json.dumps(result))
