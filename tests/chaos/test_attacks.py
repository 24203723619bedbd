"""The hardest bodies in the largest sizes that are let through: no other caller waits for the front end's processor."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from orca_jax.helpers.bundled import INSTALL_SMOLLM2, SMOLLM2, chosen_model
from tests.linear.attacks import ATTACKS, TEMPLATE
from tests.serve.running import MODEL, Server, running

KIB, MIB = 2**10, 2**20
# bytes; most kinds are refused from the second or third on
SIZES = (255 * KIB, MIB, 7 * MIB // 2, 31 * MIB)
MOST = 0.2  # seconds of the front end's processor, from a call of another caller to its answer
CALLERS = 4
JSON = {"content-type": "application/json"}
PATIENCE = (
    90.0  # seconds; then the front end is done, and a real model computes a long prompt or answer
)
HUNG_UP = 499


CONTEXTS = {MODEL: 16384, SMOLLM2: 8192}  # tokens
needs_smollm2 = pytest.mark.skipif(chosen_model()[0] != SMOLLM2, reason=INSTALL_SMOLLM2)


pytestmark = pytest.mark.timeout(900)  # a real model computes the prompts that are let through


@pytest.fixture(scope="module", params=[MODEL, pytest.param(SMOLLM2, marks=needs_smollm2)])
def thinking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose chat template changes messages, with a large context: bodies get as far as they can."""
    template = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    template.write_text(TEMPLATE)
    flags = (
        "--max-model-len",
        str(CONTEXTS[request.param]),
        "--chat-template",
        str(template),
        "--playground",
    )
    with running(*flags, "--max-num-seqs", "8", model=request.param) as server:
        yield server


def num_running(server: Server) -> float:
    """The requests that the engine runs."""
    text = server.http.get("/metrics").text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.M)))


def waits_beside(server: Server, path: str, body: bytes) -> list[float]:
    """The front end's processor time for each call of `/live` and each small completion beside the attack."""
    front_end = psutil.Process(server.process.pid)

    def used() -> float:
        times = front_end.cpu_times()
        return float(times.user + times.system)

    def attack() -> int:
        try:
            answer = httpx.post(server.url + path, content=body, headers=JSON, timeout=PATIENCE)
        except httpx.ReadTimeout:
            assert num_running(server), "the front end still reads the call"
            return HUNG_UP
        return answer.status_code

    found: list[float] = []
    with ThreadPoolExecutor(CALLERS) as callers:
        attacks = [callers.submit(attack) for _ in range(CALLERS)]
        while not all(each.done() for each in attacks):
            start = used()
            assert server.http.get("/live").status_code == 200
            found.append(used() - start)
        for each in attacks:
            assert each.result() in (200, 400, 413, 503, HUNG_UP)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_other_caller_waits(thinking: Server, name: str, size: int) -> None:
    path, make = ATTACKS[name]
    before = psutil.Process(thinking.process.pid).memory_info().rss
    assert max(waits_beside(thinking, path, make(size))) < MOST
    assert psutil.Process(thinking.process.pid).memory_info().rss - before < 1024 * MIB


def test_no_other_caller_waits_for_bursts(thinking: Server) -> None:
    body = b'{"requests": [' + b",".join([b"[16000, 1]"] * 65) + b"]}"
    assert max(waits_beside(thinking, "/playground/burst", body)) < MOST


def test_no_other_caller_waits_for_a_long_stored_conversation(thinking: Server) -> None:
    """22 responses of 4,000 items each took 1.0 s for each small call."""
    items = [{"role": "user", "content": "x"}] * 4_000
    name = None
    for _ in range(22):
        body = {
            "input": items,
            "max_output_tokens": 1,
            "truncation": "auto",
            "previous_response_id": name,
        }
        answer = thinking.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        name = answer.json()["id"]
    small = (
        b'{"input":"x","max_output_tokens":1,"truncation":"auto","previous_response_id":"%b"}'
        % name.encode()
    )
    assert max(waits_beside(thinking, "/v1/responses", small)) < MOST
