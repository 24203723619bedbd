"""docs/quickstart.md as data, and a machine to run it on: a clone with stand-ins for pip, git and hf."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.model.reference import REFERENCE
from tests.project.source import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ERRORS: list[str] = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)

SMALL = "--max-num-seqs 4 --max-num-batched-tokens 64"  # few programs to compile
CLONED = (
    "orca_jax",
    "scripts",
    "checkpoints",
    "examples",
    "requirements",
    "pyproject.toml",
    "constraints.txt",
)

# The real Python, except for installations and the port.
PYTHON = """#!/usr/bin/env bash
case "$1 ${{2:-}}" in
"-m venv") mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python"; cp {bin}/hf {bin}/orca-jax "${{@: -1}}/bin" ;;
"-m pip") echo "$*" >>{bin}/pip.txt ;;
"-m orca_jax.serve") exec {python} "$@" {small} --port {port} ;;
*) exec {python} "$@" ;;
esac
"""
COMMAND = """#!/usr/bin/env bash
case "$1 $*" in
*--base-url*) exec {python} -m orca_jax.cli "$@" ;;
serve*) exec {python} -m orca_jax.cli "$@" {small} --port {port} ;;
generate*|chat*|batch*) exec {python} -m orca_jax.cli "$@" {small} ;;
*) exec {python} -m orca_jax.cli "$@" ;;
esac
"""
GIT = '#!/usr/bin/env bash\n[ "$1" = clone ]; mkdir "${{2##*/}}"; cd {root}; cp -r {cloned} "$OLDPWD/${{2##*/}}"\n'
HF = """#!/usr/bin/env bash
[ "$1" = download ]
while [ "$1" != --local-dir ]; do shift; done
mkdir -p "$2"; cp {model}/* "$2"
"""


def small_model(directory: Path) -> Path:
    """Write a GPT-2 of a few thousand random weights with the demo's tokenizer, in Hugging Face's format."""
    directory.mkdir()
    tensors = load_file(REFERENCE / "gpt2-12-heads" / "model.safetensors")
    config = json.loads((REFERENCE / "gpt2-12-heads" / "config.json").read_text(encoding="utf-8"))
    (table,) = [name for name in tensors if name.endswith("wte.weight")]
    random = np.random.default_rng(0)
    tensors[table] = random.normal(size=(4096, tensors[table].shape[1])).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    config |= {"vocab_size": 4096, "eos_token_id": 0, "bos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "checkpoints" / "demo" / name, directory)
    return directory


class Machine:
    """An empty home directory for the blocks of the page, run one after the other; one server at a time."""

    def __init__(self, home: Path, port: int) -> None:
        self.bin, self.clone, self.port = home / "bin", home / "orca-jax", port
        self.bin.mkdir()
        names = {
            "bin": self.bin,
            "python": sys.executable,
            "small": SMALL,
            "port": port,
            "root": ROOT,
        }
        names |= {"cloned": " ".join(CLONED), "model": small_model(home / "model")}
        programs = {
            "python3": PYTHON,
            "python3.12": PYTHON,
            "orca-jax": COMMAND,
            "git": GIT,
            "hf": HF,
        }
        for name, text in programs.items():
            (self.bin / name).write_text(text.format(**names), encoding="utf-8")
            (self.bin / name).chmod(0o755)
        self.env = {
            "HOME": str(home),
            "PATH": f"{self.bin}:{os.defpath}",
            "PYTHONPATH": str(self.clone),
        }
        self.home = home
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, text: str) -> str:
        """Run a shell block to its end; returns its standard output."""
        done = subprocess.run(
            self._command(text), cwd=self._folder(), env=self.env, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stderr.decode()}"
        return done.stdout.decode()

    def run_python(self, text: str) -> str:
        """Run a Python block in the clone; returns its standard output."""
        (self.clone / "block.py").write_text(text, encoding="utf-8")
        return self.run(".venv/bin/python block.py")

    def serve(self, text: str) -> str:
        """Start the server of a block's last line, and request a completion; returns the name of its model."""
        self.stop()
        with (self.home / "server.txt").open("wb") as log:
            self.server = subprocess.Popen(
                self._command(text),
                cwd=self._folder(),
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        url = f"http://localhost:{self.port}"
        self._wait(f"{url}/ready")
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"model": model, "prompt": "a", "max_tokens": 2},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return str(model)

    def stop(self) -> None:
        """End the server, if there is one."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(30)
            self.server = None

    def _command(self, text: str) -> list[str]:
        return [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            text.replace("localhost:8000", f"localhost:{self.port}"),
        ]

    def _folder(self) -> Path:
        return self.clone if self.clone.exists() else self.home

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + 300
        while True:
            assert self.server is not None and self.server.poll() is None, (
                self.home / "server.txt"
            ).read_text()
            assert time.monotonic() < deadline, (self.home / "server.txt").read_text()
            try:
                if httpx.get(url).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
