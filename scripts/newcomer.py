"""Times the path of a newcomer: clone, first command, first token, first answer in a browser, first own model.

    python scripts/newcomer.py

clones this repository at HEAD into an empty folder and runs `./scripts/serve` there as the README says, with an empty
home and empty caches. Then a browser without a window opens the playground and sends a message (without playwright and
chromium: HTTP alone), and `orca-jax serve --model DIR` serves a small model in Hugging Face's format. It prints a line
for each step, and one JSON object as the last line. It downloads packages of some 200 MB.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from orca_jax.helpers.processor import cpu_name

ROOT = Path(__file__).resolve().parents[1]
# variables of the network
PASSED = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "LANG")
SECONDS = 1800  # for one step
MESSAGE = "What is the capital of France?"
OWN_MODEL = """
import json, shutil, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
demo, folder = Path("checkpoints/demo"), Path(sys.argv[1])
folder.mkdir()
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    shutil.copy(demo / name, folder)
config = json.loads((demo / "config.json").read_text())
rows, embed, mlp, layers, heads = config["vocab_size"], 64, 128, 2, 4
config = {"model_type": "llama", "vocab_size": rows, "hidden_size": embed, "intermediate_size": mlp,
          "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
          "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
          "eos_token_id": config["eos_token_id"]}
shapes = {"model.embed_tokens.weight": (rows, embed), "model.norm.weight": (embed,)}
for layer in range(layers):
    for name, shape in {"self_attn.q_proj": (embed, embed), "self_attn.k_proj": (embed, embed),
                        "self_attn.v_proj": (embed, embed), "self_attn.o_proj": (embed, embed),
                        "mlp.gate_proj": (mlp, embed), "mlp.up_proj": (mlp, embed), "mlp.down_proj": (embed, mlp),
                        "input_layernorm": (embed,), "post_attention_layernorm": (embed,)}.items():
        shapes[f"model.layers.{layer}.{name}.weight"] = shape
draw = np.random.default_rng(0)
save_file({name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()},
          folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps(config))
"""


class StartedServer(NamedTuple):
    """A server that may still be starting, and its address."""

    url: str
    process: "subprocess.Popen[bytes]"


class Journey:
    """Steps of the path with their seconds since its beginning.

    Args:
        folder: empty; the clone and the home are made in it.
    """

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "orca-jax"
        home = folder / "home"
        home.mkdir()
        search = f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        kept = {
            name: value for name, value in os.environ.items() if name.upper().startswith(PASSED)
        }
        self.variables = {**kept, "PATH": search, "HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.seconds: dict[str, float] = {}
        self._begun = time.monotonic()

    def restart(self) -> None:
        """Begin to count again."""
        self._begun = time.monotonic()

    def done(self, name: str, text: str) -> None:
        """Note the end of a step, and print it."""
        self.seconds[name] = round(time.monotonic() - self._begun, 1)
        print(f"{self.seconds[name]:7.1f} s  {text}", flush=True)

    @contextmanager
    def server(self, *command: str) -> Iterator[StartedServer]:
        """Run a server until the end of the block. Yield it before it is ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = self.clone.parent / "server.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=self.clone,
                env=self.variables,
                stdout=out,
                stderr=out,
            )
            try:
                yield StartedServer(f"http://127.0.0.1:{port}", process)
                if process.poll() is not None:
                    raise SystemExit(f"error: the server ended with status {process.returncode}")
            except BaseException:
                print(log.read_text()[-2000:], file=sys.stderr)
                raise
            finally:
                process.terminate()
                process.wait()

    def wait_for(self, server: StartedServer) -> None:
        """Wait until a server is ready; note the end of the installation before it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if (
                "installed" not in self.seconds
                and (self.clone / ".venv" / ".orca-installed").exists()
            ):
                self.done("installed", "the package is installed")
            if server.process.poll() is not None:
                raise SystemExit(
                    f"error: the server ended with status {server.process.returncode} before it was ready"
                )
            try:
                with urlopen(f"{server.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.2)
        raise SystemExit("error: the server is not ready in time")


def first_token(url: str) -> None:
    """Read a stream of a completion up to its first token. The model is the served one."""
    body = {"prompt": "The sea was", "max_tokens": 8, "stream": True, "ignore_eos": True}
    request = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                return
    raise SystemExit("error: the stream has no token")


def first_answer(url: str) -> tuple[str, str]:
    """Send a message as a visitor of the playground does. Returns the program used and the answer."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        with urlopen(url, timeout=60) as page:
            assert b"<html" in page.read()
        body = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": 64}
        request = Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urlopen(request, timeout=SECONDS) as response:
            return "http", json.load(response)["choices"][0]["message"]["content"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.fill("#input", MESSAGE)
        page.click("#send")
        answer = page.locator(".message:not(.user)").first
        answer.get_by_text("Regenerate").wait_for(timeout=1000 * SECONDS)
        text = answer.locator(".body").inner_text()
        browser.close()
        return "chromium", text


def main(argv: Sequence[str] | None = None) -> int:
    """Walk the path; print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="orca-jax-newcomer-") as folder:
        found = walk(Journey(Path(folder)))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [load, os.getloadavg()[0]],
    }
    print(json.dumps({**found, **machine, "commit": commit.stdout.strip()}))
    return 0


def walk(path: Journey) -> Mapping[str, Any]:
    """Walk the path. Returns the seconds of its steps."""
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(path.clone)], check=True
    )
    path.done("cloned", "the repository is cloned")
    with path.server("./scripts/serve") as server:
        path.wait_for(server)
        path.done("ready", "./scripts/serve is ready")
        first_token(server.url)
        path.done("first_token", "first token over HTTP")
        program, answer = first_answer(server.url)
        path.done(
            "first_answer",
            f"first answer in the playground ({program}): {' '.join(answer.split())[:80]!r}",
        )
    own = str(path.clone.parent / "own")
    python = str(path.clone / ".venv" / "bin" / "python")
    subprocess.run([python, "-c", OWN_MODEL, own], cwd=path.clone, env=path.variables, check=True)
    path.restart()
    with path.server(
        str(path.clone / ".venv" / "bin" / "orca-jax"), "serve", "--model", own
    ) as server:
        path.wait_for(server)
        first_token(server.url)
        path.done("own_model", "own model: from orca-jax serve --model DIR to its first token")
    return {"seconds": path.seconds, "answered_by": program, "answer": answer}


if __name__ == "__main__":
    sys.exit(main())
