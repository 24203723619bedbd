"""A small model on the devices of several processes: the tokens of one process, and the same behaviour at a loss."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.launch import free_ports
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams
from tests.cluster.hosts import DEVICE_FLAGS, Hosts, hosts, key_flag
from tests.cluster.test_failures import lose
from tests.covering import slow
from tests.model.reference import copy_of
from tests.serve.running import spawn

pytestmark = pytest.mark.chaos

TWELVE_HEADS = str(Path(__file__).parents[1] / "fixtures" / "reference" / "gpt2-12-heads")
PROMPT = "one two three"
SAMPLING: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama in files, which compile nothing, with a long context."""
    folder = copy_of("llama-12-heads-3-groups", tmp_path_factory.mktemp("models"))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "max_position_embeddings": 1024}), encoding="utf-8")
    return str(folder)


def tokens_of_one_process(model: str) -> list[int]:
    config = EngineConfig(
        model, tokenizer="byte", max_num_seqs=2, max_num_batched_tokens=4, num_pages=20, page_size=8, max_model_len=64,
        tensor_parallel_size=1, compile_cache=None, progress=False,
    )  # fmt: skip
    tokens = []
    with build_engine(config) as built:
        built.engine.add_request("one", list(PROMPT.encode()), SamplingParams(**SAMPLING))
        while built.engine.has_work:
            tokens += [token for update in built.engine.step() for token in update.new_ids]
    return tokens


def tokens_of(served: Hosts, model: str, *, cached: int | None = None) -> list[int]:
    """The tokens of an answer; `cached` are the prompt's tokens that must come from the prefix cache."""
    body = {"model": model, "prompt": PROMPT, "return_token_ids": True, **SAMPLING}
    answer = served.server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if cached is not None:
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize(
    ("stages", "is_lost"),
    [
        pytest.param(1, False, id="tensor"),
        slow(1, True, id="tensor, a loss"),
        slow(2, True, id="pipeline, a loss"),
    ],
)
@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
def test_two_processes(
    stages: int, is_lost: bool, model: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share each layer, or have half of the layers each. In a pipeline only the leader has tokens."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    expected = tokens_of_one_process(model)
    with hosts(
        2,
        *DEVICE_FLAGS,
        f"--pipeline-parallel-size={stages}",
        f"--compile-cache={cache}",
        model=model,
    ) as two:
        assert tokens_of(two, model) == expected
        # A page, and the beginning of the next one in a copy of its block.
        assert tokens_of(two, model, cached=len(PROMPT) - 1) == expected
        if is_lost:
            lose(two, two.workers[0].kill, model=model, max_tokens=1000)
            assert two.leader_status() == ExitStatus.CLUSTER_LOST
            assert two.statuses() == [-signal.SIGKILL]


@pytest.mark.slow
@pytest.mark.record
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("few_programs", "quick_compiles")
def test_four_processes_after_a_minute_of_rest(cache: str) -> None:
    """Gloo, which connects the devices of CPUs, has limits of half a minute."""
    expected = tokens_of_one_process(TWELVE_HEADS)
    with hosts(
        4, *DEVICE_FLAGS, "--max-model-len=64", f"--compile-cache={cache}", model=TWELVE_HEADS
    ) as four:
        assert tokens_of(four, TWELVE_HEADS) == expected
        time.sleep(65)
        assert tokens_of(four, TWELVE_HEADS) == expected
        start = time.monotonic()
        os.kill(four.server.engine().pid, signal.SIGKILL)
        assert set(four.statuses()) <= {ExitStatus.LEADER_LOST, ExitStatus.RUNTIME}
        assert four.leader_status() == ExitStatus.ENGINE_FAILED
        assert time.monotonic() - start < 15


@pytest.mark.slow
def test_a_stopped_process(model: str, cache: str) -> None:
    """The device of the leader waits for ever; the leader ends all the same."""
    with hosts(
        2, *DEVICE_FLAGS, f"--compile-cache={cache}", "--control-timeout=2", model=model
    ) as two:
        assert tokens_of(two, model)
        stop = partial(two.workers[0].send_signal, signal.SIGSTOP)
        lose(two, stop, model=model, max_tokens=1000)
        assert two.leader_status() == ExitStatus.CLUSTER_LOST
        two.workers[0].kill()


@pytest.mark.slow
def test_the_coordinator_with_certificates(model: str, cache: str, tmp_path: Path) -> None:
    """A worker with a certificate of other authorities cannot join the data plane."""
    files = {name: make_certificate(tmp_path / name) for name in ("ours", "theirs")}
    with hosts(2, *DEVICE_FLAGS, *files["ours"], f"--compile-cache={cache}", model=model) as two:
        assert tokens_of(two, model)
    flags = (
        "--model",
        model,
        *DEVICE_FLAGS,
        "--nnodes=2",
        f"--master-port={free_ports()}",
        "--port=0",
    )
    flags = (*flags, key_flag(tmp_path))
    leader = spawn(*flags, *files["ours"])
    stranger = spawn(*flags, *files["theirs"], "--node-rank=1")
    with leader, stranger:
        try:
            assert stranger.wait(150) != 0
        finally:
            for process in (leader, stranger):
                process.kill()


def make_certificate(folder: Path) -> list[str]:
    """The flags of a certificate for this machine, with its authorities."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    folder.mkdir()
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for words in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ca.key -out ca.crt -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout node.key -out node.csr -subj /CN=node",
        "x509 -req -in node.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out node.crt",
    ):
        subprocess.run([openssl, *words.split()], cwd=folder, check=True, capture_output=True)
    names = {"mtls-cert-file": "node.crt", "mtls-key-file": "node.key", "mtls-ca-file": "ca.crt"}
    return [f"--{flag}={folder / name}" for flag, name in names.items()]
