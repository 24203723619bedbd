"""Open WebUI in a real browser: a tool turn, a title, two turns, and its stop button; needs Debian's `chromium`.

    judge_open_webui.py [--without-tools] --url ... --model ... --api-key ... --report FILE

With `--without-tools` the model's chat template shows no tools, and the page holds two turns. The bodies of the first
two calls are written as `.judges/open-webui.json`, as in tests/fixtures/agents: with keys, types and lengths, and
without prose.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from playwright.sync_api import expect as on_page

from lab.judges.clients import checks
from lab.judges.clients.checks import expect
from lab.judges.clients.client_common import wait_idle
from lab.judges.clients.judge_agent import calls_with_tools, record
from lab.judges.recorder import Exchange, Recorder
from tests.agents.checkpoint import ANSWER, ENDLESS

START_SECONDS = 180
SECONDS = 30_000  # a limit of the page, in milliseconds
TITLE = "Printing"  # in the model's JSON
TOOL_RESULT = "View Result from get_current_timestamp"


class Shown:
    """The page, with its calls of the server and what it asked of others."""

    def __init__(self, page: Page, url: str, seen: list[Exchange], strangers: list[str]) -> None:
        self.page = page
        self.url = url
        self.seen = seen
        self.strangers = strangers

    def ask(self, text: str) -> None:
        """Send a message of the user."""
        self.page.locator("#chat-input").click()
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def expect_texts(self, text: str, count: int) -> None:
        """Wait until a text is shown so often."""
        on_page(self.page.get_by_text(text, exact=True)).to_have_count(count, timeout=SECONDS)


def finishes_a_tool_turn(shown: Shown) -> None:
    shown.ask("What time is it?")
    shown.expect_texts(ANSWER, 1)
    shown.expect_texts(TOOL_RESULT, 1)
    second = calls_with_tools(shown.seen)[1][0]["messages"]
    expect([message["role"] for message in second[-2:]] == ["assistant", "tool"], f"{second[-2:]}")


def gets_a_title(shown: Shown) -> None:
    on_page(shown.page).to_have_title(re.compile(f"^{TITLE} "), timeout=SECONDS)


def holds_a_second_turn(shown: Shown) -> None:
    shown.ask("And now?")
    shown.expect_texts(ANSWER, 2)
    shown.expect_texts(TOOL_RESULT, 2)


def stop_ends_the_request(shown: Shown) -> None:
    wait_idle(shown.url)
    shown.page.goto(shown.page.url.partition("/c/")[0])
    shown.page.locator("#chat-input").wait_for()
    shown.ask(f"{ENDLESS}.")
    shown.page.wait_for_timeout(1000)
    before = time.monotonic()
    # By a script without a wait: the long answer keeps the page busy.
    shown.page.evaluate("document.querySelector('button[aria-label=Stop]').click()")
    wait_idle(shown.url, 30)
    print(f"idle {time.monotonic() - before:.2f} s after the click", file=sys.stderr)
    last = calls_with_tools(shown.seen)[-1][1]
    expect(not last.complete and b"three" in last.body, "the answer ended by itself")


def holds_two_turns_without_tools(shown: Shown) -> None:
    for number, text in enumerate(("What time is it?", "And now?"), 1):
        shown.ask(text)
        shown.expect_texts(ANSWER, number)
    calls = calls_with_tools(shown.seen)
    expect(len(calls) == 2, f"{len(calls)} calls with tools")
    for _, exchange in calls:
        expect(
            "tools" in exchange.headers.get("x-orca-ignored-fields", ""),
            f"headers {exchange.headers}",
        )


def every_call_is_answered(shown: Shown) -> None:
    refused = [f"{one.method} {one.target} {one.status}" for one in shown.seen if one.status != 200]
    expect(shown.seen and not refused, f"refused: {refused}")


def asks_nothing_of_others(shown: Shown) -> None:
    expect(not shown.strangers, f"asked for {shown.strangers}")


@contextlib.contextmanager
def serving(url: str, key: str, strangers: list[str]) -> Iterator[str]:
    """Run Open WebUI; yields its address. Connections to other machines go to a proxy that notes and refuses them."""
    with tempfile.TemporaryDirectory() as home, socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=refuse_all, args=(proxy, strangers), daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        other = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        variables = {
            **{
                "PATH": os.environ["PATH"],
                "HOME": home,
                "DATA_DIR": home,
                "WEBUI_AUTH": "false",
                "WEBUI_SECRET_KEY": key,
            },
            **{
                "OPENAI_API_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": key,
                "ENABLE_OLLAMA_API": "false",
            },
            **{"OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "false"},
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), other),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        }
        words = [
            str(Path(sys.executable).with_name("open-webui")),
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        with (Path(home) / "log").open("w") as log:
            process = subprocess.Popen(words, cwd=home, env=variables, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, Path(home) / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def refuse_all(proxy: socket.socket, strangers: list[str]) -> None:
    """Note the first line of each connection, and close it."""
    with contextlib.suppress(OSError):
        while True:
            with proxy.accept()[0] as connection:
                strangers.append(connection.recv(4096).partition(b"\r\n")[0].decode("latin-1"))


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until an address answers. Raises SystemExit."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(url, timeout=10):
            return
        time.sleep(0.5)
    raise SystemExit(f"error: Open WebUI did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


@contextlib.contextmanager
def showing(address: str, strangers: list[str]) -> Iterator[Page]:
    """The page in a browser, with its news closed."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        own = (address, address.replace("http:", "ws:"), "data:", "blob:")
        page.on(
            "request",
            lambda request: None if request.url.startswith(own) else strangers.append(request.url),
        )
        page.goto(address)
        page.get_by_role("button", name="Okay, Let's Go!").click(timeout=SECONDS)
        page.locator("#chat-input").wait_for()
        yield page
        browser.close()


def main() -> int:
    """Start the page and run the checks."""
    parser = checks.parser(__doc__)
    parser.add_argument(
        "--without-tools", action="store_true", help="the chat template shows no tools"
    )
    args = parser.parse_args()
    seen: list[Exchange] = []
    strangers: list[str] = []
    with_tools = [finishes_a_tool_turn, gets_a_title, holds_a_second_turn, stop_ends_the_request]
    tests = [holds_two_turns_without_tools] if args.without_tools else with_tools
    versions = {"open-webui": importlib.metadata.version("open-webui")}
    with (
        Recorder(urllib.parse.urlsplit(args.url).port or 80, seen.append).running() as recorder,
        serving(f"http://127.0.0.1:{recorder.port}", args.api_key, strangers) as address,
        showing(address, strangers) as page,
    ):
        shown = Shown(page, args.url, seen, strangers)
        code = checks.run(
            [*tests, every_call_is_answered, asks_nothing_of_others], shown, versions, args.report
        )
    if code == 0 and not args.without_tools:
        record(
            calls_with_tools(seen),
            Path(__file__).resolve().parents[3] / ".judges" / "open-webui.json",
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
