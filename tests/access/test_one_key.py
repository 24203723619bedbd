"""One key with 400 streams holds nobody else, with `--max-calls-per-key`, in a whole server."""

import asyncio
import json
import statistics
import time
from pathlib import Path

import pytest

from tests.serve.running import Server, running

pytestmark = pytest.mark.slow

MODEL = "preset:clock-20"
GREEDY, NUM_STREAMS, NUM_OTHERS, LIMIT = "greedy", 400, 100, 8


async def complete(server: Server, key: str, max_tokens: int, *, stream: bool = False) -> int:
    """The status of a call, after the last byte of its answer; a refused call is sent again, as clients do."""
    fields = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    while True:
        url = server.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(head.encode() + body)
            answer = await reader.read()
        finally:
            writer.close()
        status = int(answer.split(maxsplit=2)[1])
        if status != 429:
            return status
        await asyncio.sleep(1)


async def others(server: Server) -> list[float]:
    """Seconds until each of the other callers has its answer, in order."""

    async def one(number: int) -> float:
        begin = time.monotonic()
        assert await complete(server, f"key-{number}", 64) == 200
        return time.monotonic() - begin

    return sorted(await asyncio.gather(*(one(number) for number in range(NUM_OTHERS))))


async def beside_streams(server: Server) -> list[float]:
    """The same, while the greedy key sends streams without a pause."""

    async def endless() -> None:
        while True:
            await complete(server, GREEDY, 1000, stream=True)

    streams = [asyncio.create_task(endless()) for _ in range(NUM_STREAMS)]
    try:
        await asyncio.sleep(3)  # its streams run, and the rest is refused and sent again
        return await others(server)
    finally:
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_400_streams_of_one_key_leave_room_for_100_others(policy: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "\n".join([GREEDY, *(f"key-{number}" for number in range(NUM_OTHERS))]), encoding="utf-8"
    )
    keys.chmod(0o600)
    flags = ("--max-num-seqs", "64", "--scheduling-policy", policy, "--api-key-file", str(keys))
    limit = ("--max-calls-per-key", str(LIMIT))
    with running(*flags, *limit, model=MODEL, api_key="key-0") as server:
        alone = asyncio.run(others(server))
        beside = asyncio.run(asyncio.wait_for(beside_streams(server), 150))
    middle, last = (
        f"{name(beside):.2f} s, alone {name(alone):.2f} s" for name in (statistics.median, max)
    )
    print(f"{policy}: median {middle}; last {last}")
    assert max(beside) <= 2 * max(alone), last
    assert statistics.median(beside) <= 2 * statistics.median(alone), middle
