"""A server starts and answers on a read-only root without a folder for temporary files, as in a pod with a mistake.

The plugin of JAX for GPUs is installed, so the attention kernels are tested before the engine starts.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.ray_serving import free_port
from tests.project.source import ROOT

COMPILERS = ROOT / ".compilers"
READ_ONLY = "mount --make-rprivate / && mount -o remount,bind,ro / && exec "
SECONDS = 150

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not COMPILERS.is_dir(),
    reason="needs root and the compilers",
)


def answer(port: int) -> str:
    body = json.dumps({"prompt": "The sea was", "max_tokens": 1}).encode()
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    end = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(call, timeout=SECONDS) as response:
                text: str = json.load(response)["choices"][0]["text"]
                return text
        except urllib.error.URLError:
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.record
@needs_namespaces
@pytest.mark.timeout(2 * SECONDS)
def test_a_server_on_a_read_only_root(tmp_path: Path) -> None:
    """It logs each refusal while it loads to a file: a full pipe would stop it."""
    port = free_port()
    log = tmp_path / "log"
    sizes = "--max-num-seqs 1 --max-model-len 64 --max-num-batched-tokens 16"
    command = f"{sys.executable} -m orca_jax.serve --model demo --port {port} {sizes}"
    variables = os.environ | {"PYTHONPATH": str(COMPILERS), "HOME": "/nonexistent"}
    variables.pop("JAX_PLATFORMS", None)
    with log.open("wb") as stderr:
        server = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", READ_ONLY + command],
            env=variables,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        assert answer(port)
    finally:
        server.terminate()
        server.wait(60)
    assert "testing the attention kernels" in log.read_text(encoding="utf-8")
