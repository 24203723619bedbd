"""The playground in a real browser, on a desktop and on a phone: CONTRIBUTING.md says how to get the parts.

Run: `python -m pytest -n 0 -m browser tests/playground`
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.playground.shown import MODEL, Shown, server, shown, text_of
from tests.serve.running import Server, running
from tests.timeline.browser import AXE, SIZES, browser, check_with_axe

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

KEY = "sk-browser"

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "server", "shown"]  # fixtures


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
    shown.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=stream, headers=sent)
    )
    return shown.open(server.url)


def test_an_answer_arrives_with_its_figures(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    shown.ask("hello", 16)
    shown.wait_for_answer()
    assert text_of(page, ".message.user .body") == "hello"
    page.locator(".stats", has_text="tokens/s").wait_for()
    assert re.search(
        r"16 tokens, [\d.]+ tokens/s, first token after \d+ ms, length", text_of(page, ".stats")
    )
    shown.show_tokens()
    assert page.locator(".token").count() == 16
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page scrolls sideways"
    )


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
    assert (
        page.locator(".message").count() == 2 and text_of(page, ".message.user .body") == "changed"
    )
    before = text_of(page, ".message:not(.user) .body")
    page.get_by_text("Regenerate").click()
    shown.wait_for_answer()
    assert (
        page.locator(".message").count() == 2
        and text_of(page, ".message:not(.user) .body") != before
    )


def test_tokens_show_their_alternatives_by_pointer_and_keyboard(
    shown: Shown, server: Server
) -> None:
    page = shown.open(server.url)
    shown.ask("hello", 8)
    shown.wait_for_answer()
    assert page.locator(".token").count() == 0
    shown.show_tokens()
    page.set_viewport_size({"width": 390, "height": 520})
    page.locator(".token").nth(2).click()
    assert page.locator(".choices tr").count() >= 5 and page.locator(".choices .drawn").count() == 1
    ends = [
        page.locator(each).evaluate("one => one.getBoundingClientRect().bottom")
        for each in (".choices", "#messages")
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
    assert all(
        f'"{name}":{json.dumps(value, separators=(",", ":"))}' in command
        for name, value in body.items()
    )
    with page.expect_download() as download:
        page.click("#export")
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert saved["mode"] == "prompt" and [each["role"] for each in saved["messages"]] == [
        "user",
        "assistant",
    ]
    assert saved["messages"][1]["stats"]["tokens"] <= 4


def test_the_narrowest_phone_shows_the_whole_header(browser: "Browser", server: Server) -> None:
    shown = Shown(browser, "phone")
    shown.page.set_viewport_size({"width": 320, "height": 640})
    page = shown.open(server.url)
    for pane in ("chat", "engine"):
        shown.show(pane)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "the page scrolls sideways"
        )
        assert page.locator("#panes").evaluate("each => each.scrollWidth <= each.clientWidth"), (
            "the header is cut"
        )
        assert page.locator("#theme").evaluate(
            "each => each.getBoundingClientRect().right <= innerWidth"
        )
    shown.context.close()


def test_the_theme_is_kept(shown: Shown, server: Server) -> None:
    page = shown.open(server.url)
    for theme in ("light", "dark"):
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.reload()
    page.get_by_text("live", exact=True).wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"


def test_a_conversation_survives_a_reload_the_other_mode_and_a_clear(
    shown: Shown, server: Server
) -> None:
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
    assert (
        text_of(page, ".message.user .body") == "first"
        and text_of(page, ".markdown strong") == "One"
    )
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
    assert "<b>HTML</b>" in text_of(
        page, ".markdown p"
    ) and "[another](javascript:alert(1))" in text_of(page, ".markdown p")
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
    """The rate is that of the engine's times, where a late arrival of the first token makes it higher."""
    page = shown.open(server.url)
    with server.http.stream("GET", "/playground/iterations") as watched:
        shown.ask("hello", 40)
        shown.wait_for_answer()
        tokens = iterations_with_tokens(watched)
    first, last = (tokens[at]["collected"] for at in (0, -1))
    page.locator(".stats", has_text="tokens/s").wait_for()
    rate = re.search(r"([\d.]+) tokens/s", text_of(page, ".stats"))
    assert rate is not None and len(tokens) == 40
    assert 50 < float(rate[1]) == pytest.approx(39 / (last - first), abs=0.051)
    assert last - tokens[0]["planned"] >= 40 * 0.01, "an iteration takes 10 ms"


def iterations_with_tokens(watched: httpx.Response) -> list[dict[str, Any]]:
    """The iterations of the only request that wrote a token, until its end."""
    found = []
    for line in watched.iter_lines():
        record = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        if "end" in record:
            break
        iteration = record.get("iteration", {"increments": [], "chunks": []})
        if iteration["increments"] or any(samples for *_, samples in iteration["chunks"]):
            found.append(iteration)
    return found


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
def test_axe_finds_no_serious_fault(
    browser: "Browser", server: Server, size: str, scheme: Any
) -> None:
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
    # held back, since it could begin a stop string
    ([("", ["st"]), ("step", ["ep"])], ["st", "ep"]),
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
