"""The playground in a real browser, on a desktop and on a phone: CONTRIBUTING.md says how to get the parts.

Run: `python -m pytest -n 0 -m browser tests/playground`
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_jax.timeline.spans import request_spans
from tests.sched.lab import Lab
from tests.serve.running import Server, running, wait_until
from tests.timeline.browser import AXE, SIZES, WatchedPage, browser, check_with_axe, count_colors
from tests.timeline.test_live import WatchedLab
from tests.timeline.traced import ONE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

KEY = "sk-browser"
MODEL = "preset:clock-10"  # an iteration takes 10 ms

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser"]  # a fixture


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


def answer(text: str, thought: str = "") -> str:
    """The stream of an answer, with a token for each word."""

    def event(name: str, word: str) -> str:
        top = [{"token": word, "logprob": -0.5}, {"token": "other", "logprob": -2.0}]
        logprobs = {"content": [{**top[0], "top_logprobs": top}]}
        choice = {"index": 0, "delta": {name: word}, "finish_reason": None, "logprobs": logprobs}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    words = [event("reasoning", word) for word in re.findall(r"\S+\s*", thought)]
    words += [event("content", word) for word in re.findall(r"\S+\s*", text)]
    return "".join(words) + "data: [DONE]\n\n"


def chatting(shown: Shown, server: Server, stream: str) -> "Page":
    """Open the page as that of a model for chats, which always answers the same."""

    def settings(route: "Route") -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "has_chat": True})

    sent = {"content-type": "text/event-stream"}
    shown.page.route("**/playground/settings", settings)
    shown.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, headers=sent))
    return shown.open(server.url)


def text_of(page: "Page", selector: str) -> str:
    return page.locator(selector).first.inner_text()


def test_an_answer_arrives_with_its_figures(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.ask("hello", 16)
    shown.wait_for_answer()
    assert text_of(page, ".message.user .body") == "hello"
    page.locator(".stats", has_text="tokens/s").wait_for()
    assert re.search(r"16 tokens, [\d.]+ tokens/s, first token after \d+ ms, length", text_of(page, ".stats"))
    shown.show_tokens()
    assert page.locator(".token").count() == 16
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def test_a_stop_ends_the_answer_and_the_request(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.ask("hello", 400)
    page.locator(".stats", has_text="first token").wait_for()
    assert text_of(page, "#send") == "Stop"
    page.click("#send")
    shown.wait_for_answer()
    assert "stopped here" in text_of(page, ".stats")
    shown.show_tokens()
    assert 0 < page.locator(".token").count() < 400
    assert text_of(page, "#send") == "Send"
    server.wait_idle()


def test_an_edit_and_a_regeneration_replace_what_follows(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    for number, text in enumerate(("first", "second")):
        shown.ask(text, 8)
        shown.wait_for_answer(number)
    assert page.locator(".message").count() == 4
    page.locator(".message.user").first.get_by_text("Edit").click()
    page.get_by_label("New text of the message").fill("changed")
    page.get_by_text("Send again").click()
    shown.wait_for_answer()
    assert page.locator(".message").count() == 2 and text_of(page, ".message.user .body") == "changed"
    before = text_of(page, ".message:not(.user) .body")
    page.get_by_text("Regenerate").click()
    shown.wait_for_answer()
    assert page.locator(".message").count() == 2 and text_of(page, ".message:not(.user) .body") != before


def test_tokens_show_their_alternatives_by_pointer_and_keyboard(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.ask("hello", 8)
    shown.wait_for_answer()
    assert page.locator(".token").count() == 0
    shown.show_tokens()
    page.set_viewport_size({"width": 390, "height": 520})
    page.locator(".token").nth(2).click()
    assert page.locator(".choices tr").count() >= 5 and page.locator(".choices .drawn").count() == 1
    ends = [
        page.locator(each).evaluate("one => one.getBoundingClientRect().bottom") for each in (".choices", "#messages")
    ]
    assert ends[0] <= ends[1] + 1, "the alternatives need a scroll"
    page.locator(".token").nth(2).click()
    assert page.locator(".choices").count() == 0
    page.locator(".token").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert page.locator(".token").nth(1).get_attribute("aria-expanded") == "true"


def test_prompts_parameters_and_exports(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    page.click("button[data-mode=prompt]")
    page.click("#parameters summary")
    for name, value in {"temperature": "0", "seed": "7", "stop": "a\nb"}.items():
        page.fill(f"#fields [name={name}]", value)
    shown.ask("it's", 4)
    shown.wait_for_answer()
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("Copy as curl").click()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl -N '{server.url}/v1/completions'") and "it'\\''s" in command
    body = {"temperature": 0, "seed": 7, "max_tokens": 4, "stop": ["a", "b"]}
    assert all(f'"{name}":{json.dumps(value, separators=(",", ":"))}' in command for name, value in body.items())
    with page.expect_download() as download:
        page.click("#export")
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert saved["mode"] == "prompt" and [each["role"] for each in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][1]["stats"]["tokens"] <= 4


def test_a_burst_and_its_replay(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.show("engine")
    assert text_of(page, "#gain") == "Send a burst to compare two kinds of scheduling."
    page.click("#burst")
    wait_until(lambda: int(text_of(page, "[data-figure=running]")) > 1)
    page.locator("#burst:not(:disabled)").wait_for()
    page.locator("#gain", has_text="sooner").wait_for()
    mean = r"(\d+) iterations, an answer after (\d+)"
    numbers = re.search(rf"tion-level scheduling: {mean} .*Request-level scheduling: {mean}", text_of(page, "#result"))
    assert numbers is not None
    here, mean_here, there, mean_there = (int(number) for number in numbers.groups())
    gains = re.fullmatch(r"([\d.]+) times sooner, ([\d.]+) times fewer iterations", text_of(page, "#gain"))
    assert gains is not None and float(gains[2]) == round(there / here, 1) > 1
    assert abs(float(gains[1]) - mean_there / mean_here) < 0.1
    assert "request-level: computed in this page" in text_of(page, "#basis")
    first = page.evaluate("document.querySelector('#replay').getBoundingClientRect().bottom")
    assert first < page.viewport_size["height"], "the result needs a scroll"
    assert page.url.endswith("/#burst=16&seed=1")
    pixels = count_colors(900, 400)
    assert all(page.locator(canvas).evaluate(pixels) > 20 for canvas in ("#rows", "#replay", "#batch"))
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


def test_the_narrowest_phone_shows_the_whole_header(browser: "Browser", server: Server) -> None:
    shown = Shown(browser, "phone")
    shown.page.set_viewport_size({"width": 320, "height": 640})
    page = shown.open(server.url)
    for pane in ("chat", "engine"):
        shown.show(pane)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        assert page.locator("#panes").evaluate("each => each.scrollWidth <= each.clientWidth"), "the header is cut"
        assert page.locator("#theme").evaluate("each => each.getBoundingClientRect().right <= innerWidth")
    shown.context.close()


def test_the_theme_is_kept(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    for theme in ("light", "dark"):
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.reload()
    page.get_by_text("live", exact=True).wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"


def test_a_conversation_survives_a_reload_the_other_mode_and_a_clear(shown: Shown, server: Server) -> None:
    page = chatting(shown, server, answer("**One** two."))
    shown.ask("first")
    shown.wait_for_answer()
    page.click("button[data-mode=prompt]")
    assert page.locator(".message").count() == 0 and page.locator(".example").count() == 3
    page.click("button[data-mode=chat]")
    assert page.locator(".message").count() == 2
    page.click("#clear")
    assert page.locator(".message").count() == 0 and text_of(page, "#clear") == "Undo clear"
    page.click("#clear")
    assert page.locator(".message").count() == 2 and text_of(page, "#clear") == "Clear"
    page.reload()
    page.get_by_text("live", exact=True).wait_for()
    assert text_of(page, ".message.user .body") == "first" and text_of(page, ".markdown strong") == "One"
    page.locator(".message:not(.user)").get_by_text("Regenerate").click()
    page.locator(".message:not(.user)").get_by_role("button", name="Tokens").wait_for()


MARKDOWN = """# Title

One **bold** and `code` with <b>HTML</b>, a [link](https://example.org/x), [another](javascript:alert(1)) and
![picture](https://example.org/p.png).

1. first
2. second
   - inner

```python
a < b  # *not emphasis*
```

<script>alert(1)</script>

| a | b |
|---|---|
| 1 | 2 |
"""


def test_markdown_becomes_elements_and_never_html(shown: Shown, server: Server) -> None:
    page = chatting(shown, server, answer(MARKDOWN, thought="First I think."))
    shown.ask("x")
    shown.wait_for_answer()
    found = page.evaluate("""() => {
      const body = document.querySelector(".markdown");
      const made = [...body.querySelectorAll("a, img, script, b")];
      return [[...body.children].map((each) => each.tagName), made.map((each) => each.outerHTML)];
    }""")
    assert found[0] == ["H4", "P", "OL", "PRE", "P", "TABLE"]
    link = '<a href="https://example.org/x" target="_blank" rel="noopener noreferrer">link</a>'
    assert found[1] == [link]
    assert text_of(page, ".markdown pre") == "a < b  # *not emphasis*"
    assert "<b>HTML</b>" in text_of(page, ".markdown p") and "[another](javascript:alert(1))" in text_of(
        page, ".markdown p"
    )
    assert page.locator(".markdown ol li ul li").inner_text() == "inner"
    thinking = page.locator(".thinking")
    assert (
        not thinking.locator("div").is_visible()
        and thinking.evaluate("each => each.textContent") == "ThinkingFirst I think."
    )
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("Copy text").click()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    page.get_by_role("button", name="Tokens").click()
    assert page.locator(".token").count() > 20 and not thinking.is_visible()
    page.get_by_role("button", name="Tokens").click()
    assert page.locator(".token").count() == 0 and text_of(page, ".markdown strong") == "bold"


def test_markdown_that_grows_is_that_of_the_whole_text(browser: "Browser", server: Server) -> None:
    shown = Shown(browser, "desktop")
    page = shown.open(server.url)
    script = """async ([text, size]) => {
      const { Markdown } = await import("/playground/markdown.js");
      const made = [document.createElement("div"), document.createElement("div")];
      new Markdown(made[0]).add(text);
      const grown = new Markdown(made[1]);
      for (let at = 0; at < text.length; at += size) grown.add(text.slice(at, at + size));
      return made.map((each) => each.innerHTML);
    }"""
    for size in (1, 3, 17):
        whole, grown = page.evaluate(script, [MARKDOWN * 2, size])
        assert grown == whole
    shown.context.close()


def test_the_rate_is_the_engines(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.ask("hello", 40)
    shown.wait_for_answer()
    page.locator(".stats", has_text="tokens/s").wait_for()
    rate = re.search(r"([\d.]+) tokens/s", text_of(page, ".stats"))
    assert rate is not None and 50 < float(rate[1]) <= 100, "an iteration takes 10 ms"


def test_a_burst_can_be_saved_and_opened_again(shown: Shown, server: Server, tmp_path: Path) -> None:
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
    assert re.match(r"Request \d+, iteration \d+: ", text_of(page, "#cell")), "it opens at the fullest iteration"


@pytest.mark.parametrize("size", SIZES)
def test_a_server_with_keys_asks_for_one(browser: "Browser", size: str) -> None:
    with running("--api-key", KEY, model=MODEL, api_key=KEY) as server:
        shown = Shown(browser, size)
        page = shown.page
        page.goto(f"{server.url}/")
        page.fill("#key", "sk-wrong")
        page.get_by_role("button", name="Use key").click()
        page.get_by_text("not one of the server's").wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Enter the API key").wait_for()
        page.fill("#input", "hello")
        page.press("#input", "Enter")
        page.get_by_role("button", name="Cancel").click()
        assert page.input_value("#input") == "hello"
        page.get_by_role("button", name="Enter the API key").click()
        page.fill("#key", KEY)
        page.get_by_role("button", name="Use key").click()
        page.get_by_text("live", exact=True).wait_for()
        shown.ask("hello", 4)
        shown.wait_for_answer()
        shown.context.close()
        assert all("401" in fault for fault in shown.faults)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_no_serious_fault(browser: "Browser", server: Server, size: str, scheme: Any) -> None:
    if not AXE.exists():
        pytest.skip("needs axe-core")
    shown = Shown(browser, size, color_scheme=scheme, bypass_csp=True)
    page = shown.open(server.url)
    shown.ask("hello", 6)
    shown.wait_for_answer()
    shown.show_tokens()
    page.locator(".token").nth(2).click()
    page.click("#parameters summary")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    check_with_axe(page)
    shown.show("engine")
    page.click("#burst")
    page.click("#table-part summary")
    page.locator("#burst:not(:disabled)").wait_for(timeout=60_000)
    check_with_axe(page)
    shown.context.close()


PIECES: list[tuple[list[tuple[str, list[str]]], list[str]]] = [
    ([("one two", ["one", " two"])], ["one", " two"]),
    ([("one", ["one", "<end>"])], ["one"]),
    ([("", ["bytes:\\xe2"]), ("\u20ac!", ["bytes:\\x82\\xac", "!"])], ["\u20ac", "!"]),
    ([("a\u20ac", ["a", "bytes:\\xe2", "bytes:\\x82\\xac"])], ["a", "\u20ac"]),
    ([("", ["st"]), ("step", ["ep"])], ["st", "ep"]),  # held back, since it could begin a stop string
    ([("no tokens", [])], []),
]


def test_texts_and_tokens_need_not_agree(browser: "Browser", server: Server) -> None:
    shown = Shown(browser, "desktop")
    page = shown.open(server.url)
    script = """async (pieces) => {
      const body = document.createElement("div");
      const text = new (await import("/playground/tokens.js")).TokenText(body);
      const made = (tokens) => tokens.map((each) => ({ text: each, logprob: 0, top: [] }));
      for (const [piece, tokens] of pieces) text.add(piece, made(tokens));
      text.flush();
      return [body.textContent, [...body.querySelectorAll(".token")].map((each) => each.textContent)];
    }"""
    for pieces, spans in PIECES:
        assert page.evaluate(script, pieces) == ["".join(text for text, _ in pieces), spans]
    shown.context.close()


SHAPES: dict[str, dict[str, Any]] = {
    "preempted": {},
    "ends late": {"depth": 2},
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_page_has_the_spans_of_the_timeline(browser: "Browser", server: Server, case: str) -> None:
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
    for (state, generated, spans), (n, expected) in zip(found, request_spans(run).items(), strict=True):
        assert (state, generated) == ("ended", run.ends[n].generated)
        assert spans == joined([(each.kind, each.first, each.last, each.tokens) for each in expected])
    again = page.evaluate(script, [*lines, {"start": {**lines[0]["start"], "num_arrived": 0}}])
    assert again == [], "another engine counts from 0"
    shown.context.close()


def joined(spans: list[tuple[str, int, int, int]]) -> list[list[Any]]:
    """Waits for different reasons joined, and spans of admitted requests without work left out."""
    result: list[list[Any]] = []
    for kind, first, last, tokens in spans:
        if result and result[-1][0] == kind and result[-1][2] == first - 1 and kind in ("waiting", "preempted"):
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
        requests = [(draws.randrange(1, 9), draws.randrange(1, 9)) for _ in range(draws.randrange(1, 12))]
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
        assert [row["end"] for row in replay["rows"]] == [ends[str(i)] for i in range(len(requests))]
        assert replay["total"] == lab.engine.stats.iterations
    shown.context.close()
