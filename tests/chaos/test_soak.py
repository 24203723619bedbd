"""Twenty thousand random calls with random hang-ups: nothing is left behind."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from tests.chaos.world import metrics, request, usage, wait_calm, watched
from tests.serve.running import MODEL, VOCAB_SIZE, Server, running

CALLS = 20_000
WARM_UP = 4_000
CALLERS = 48
MIB = 2**20
OPENAI_REASONS = {"stop", "length", "tool_calls"}
MESSAGE_REASONS = {"end_turn", "max_tokens", "stop_sequence"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Holdings:
    """The resources of the two processes between calls."""

    memory: int  # bytes, of both processes
    files: int
    threads: int
    tasks: float


@dataclass
class Tally:
    """The ends of calls; `problems` must stay empty."""

    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def holdings(server: Server) -> Holdings:
    family = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    return Holdings(
        sum(process.memory_info().rss for process in family),
        sum(process.num_fds() for process in family),
        sum(process.num_threads() for process in family),
        metrics(server)["event_loop_tasks"],
    )


def random_fields(draw: random.Random) -> dict[str, Any]:
    """Random fields of a call, some of them wrong."""
    options: dict[str, Any] = {
        "temperature": draw.choice([0, 0.7, 2]),
        "top_p": draw.choice([0.1, 1]),
        "top_k": draw.choice([-1, 0, 5]),
        "min_p": draw.choice([0, 0.5]),
        "seed": draw.randrange(2**63),
        "stop": draw.choice(["a", ["b", "cd"], []]),
        "stop_token_ids": [draw.randrange(VOCAB_SIZE)],
        "ignore_eos": draw.random() < 0.5,
        "min_tokens": draw.randrange(3),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.5, 2),
        "logit_bias": {str(draw.randrange(VOCAB_SIZE)): draw.uniform(-100, 100)},
        "allowed_token_ids": [draw.randrange(VOCAB_SIZE) for _ in range(5)],
        "bad_words": ["x"],
        "n": draw.choice([1, 2, 3]),
        "user": "a user",
        "priority": draw.randrange(2),
        "cache_salt": "s",
        "max_tokens": draw.choice([-2, 0.5, "x"]),  # wrong
        "unknown_field": 1,  # wrong
    }
    names = draw.sample(sorted(options), draw.choice([0, 0, 1, 2, 4]))
    fields = {"max_tokens": draw.randint(3, 48), **{name: options[name] for name in names}}
    if draw.random() < 0.04:
        fields.pop("allowed_token_ids", None)  # may leave no allowed token
        fields["structured_outputs"] = draw.choice(
            [{"choice": ["yes", "no"]}, {"regex": "[a-z]{3}"}, {"json": SCHEMA}]
        )
    if draw.random() < 0.6:
        fields["stream"] = True
        if draw.random() < 0.3:
            fields["stream_options"] = {"include_usage": True}
    return fields


def random_call(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A random path and its body."""
    fields = random_fields(draw)
    text = "".join(draw.choices("abc äß\n", k=int(draw.expovariate(1 / 60))))
    if draw.random() < 0.3:
        if draw.random() < 0.2:
            fields |= {"logprobs": True, "top_logprobs": draw.randrange(5)}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}
    if draw.random() < 0.2:
        for name in ("n", "stream_options"):
            fields.pop(name, None)
        fields["max_output_tokens"] = fields.pop("max_tokens")
        return "/v1/responses", {"input": text, "store": draw.choice([True, False]), **fields}
    if draw.random() < 0.2:
        for name in ("n", "stream_options"):
            fields.pop(name, None)
        return "/v1/messages", {"messages": [{"role": "user", "content": text or "x"}], **fields}
    if draw.random() < 0.1:
        fields["logprobs"] = draw.randrange(5)
    if draw.random() < 0.05:
        fields["echo"] = True
    prompt: Any = text or "x"
    if draw.random() < 0.3:
        prompt = draw.choice([[1, 2, 3], ["a", "b"], [[5], [6, 7]], [VOCAB_SIZE]])
    return "/v1/completions", {"prompt": prompt, **fields}


class Caller:
    """A client: one connection after another, one call after another."""

    def __init__(self, server: Server, draw: random.Random, tally: Tally) -> None:
        self._address = (server.http.base_url.host, server.http.base_url.port)
        self._draw = draw
        self._tally = tally

    async def call(self) -> None:
        """Make one call, to its end or to a random hang-up."""
        path, fields = random_call(self._draw)
        whole = request({"model": MODEL, **fields}, path).replace(
            b"host: localhost", b"host: localhost\r\nconnection: close", 1
        )
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            if self._draw.random() < 0.05:
                writer.write(whole[: self._draw.randrange(len(whole))])
                await writer.drain()
                self._tally.ends["hung up in the request"] += 1
                return
            writer.write(whole)
            if self._draw.random() < 0.25:
                await asyncio.wait_for(
                    reader.read(self._draw.choice([1, 300, 3000])), 30
                ) if self._draw.random() < 0.6 else None
                if self._draw.random() < 0.5:
                    writer.transport.abort()
                self._tally.ends["hung up in the answer"] += 1
                return
            self._judge(
                await asyncio.wait_for(reader.read(), 60), bool(fields.get("stream")), path, fields
            )
        finally:
            writer.close()

    def _judge(self, answer: bytes, stream: bool, path: str, fields: dict[str, Any]) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head else 0
        if status == 200 and path == "/v1/responses":
            end = _response_end(_dechunk(body) if stream else body, stream)
        elif status == 200 and path == "/v1/messages":
            end = _message_end(_dechunk(body) if stream else body, stream)
        elif status == 200:
            end = _stream_end(body) if stream else _plain_end(body)
        elif 400 <= status < 500 and b'"error"' in body:
            end = str(status)
        else:
            end = f"problem {status}"
        self._tally.ends[end] += 1
        if end.startswith("problem"):
            self._tally.problems.append(
                f"{end}: {path} {json.dumps(fields)[:300]}: {answer[:300]!r}"
            )


def _response_end(body: bytes, stream: bool) -> str:
    """Check the status of a response, whole or in the last event of a stream."""
    last = body.rstrip().rpartition(b"\ndata: ")[2]
    value = json.loads(last)["response"] if stream else json.loads(last)
    if value["status"] not in ("completed", "incomplete"):
        return f"problem: {value['error']}"
    return "streamed" if stream else "whole"


def _message_end(body: bytes, stream: bool) -> str:
    """Check the reason of a message's end, and the last event of a stream."""
    if not stream:
        reason = json.loads(body)["stop_reason"]
        return "whole" if reason in MESSAGE_REASONS else f"problem: {reason}"
    events = [
        json.loads(event.rpartition(b"\ndata: ")[2])
        for event in body.split(b"\n\n")
        if b"\ndata: " in event
    ]
    reasons = {
        event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"
    }
    is_whole = (
        events[-1]["type"] == "message_stop" and len(reasons) == 1 and reasons <= MESSAGE_REASONS
    )
    return "streamed" if is_whole else f"problem: {reasons}, {events[-1]}"


def _plain_end(body: bytes) -> str:
    reasons = {choice["finish_reason"] for choice in json.loads(body)["choices"]}
    return "whole" if reasons <= OPENAI_REASONS else f"problem: {reasons}"


def _stream_end(body: bytes) -> str:
    """Check that every begun choice has a finish reason and that the stream has its end."""
    begun: set[int] = set()
    ended: dict[int, str] = {}
    for event in _dechunk(body).split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        value = json.loads(event[6:])
        if "error" in value:
            return f"problem: {value['error']['message'][:100]}"
        for choice in value["choices"]:
            begun.add(choice["index"])
            if choice["finish_reason"] is not None:
                ended[choice["index"]] = choice["finish_reason"]
    done = body.rstrip().endswith(b"0") and b"data: [DONE]" in body
    is_whole = done and begun == ended.keys() and set(ended.values()) <= OPENAI_REASONS
    return "streamed" if is_whole else f"problem: {begun} begun, {ended} ended, done: {done}"


def _dechunk(body: bytes) -> bytes:
    pieces, at = [], 0
    while (line := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:line], 16)):
        pieces.append(body[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(pieces)


async def storm(server: Server, calls: int, seed: int) -> Tally:
    """Make that many calls, some dozens of them at once."""
    tally, left = Tally(), iter(range(calls))

    async def caller(number: int) -> None:
        mine = Caller(server, random.Random(f"{seed}-{number}"), tally)
        for _ in left:
            try:
                await mine.call()
            except (OSError, TimeoutError) as error:
                tally.problems.append(repr(error))

    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    return tally


@pytest.mark.record
def test_soak(capsys: Any) -> None:
    """Also the store of responses, which the warm-up fills."""
    with running(
        "--max-num-seqs", "32", "--max-model-len", "8192", "--responses-store", "1"
    ) as server:
        asyncio.run(storm(server, WARM_UP, seed=0))
        wait_calm(server)
        before, counted = holdings(server), metrics(server)
        start = time.monotonic()
        with watched(server) as watch:
            tally = asyncio.run(storm(server, CALLS, seed=1))
        seconds = time.monotonic() - start
        time.sleep(1)
        after, samples = holdings(server), metrics(server)
        with capsys.disabled():
            print(
                f"\n{CALLS} calls in {seconds:.0f} s; {watch.pieces} pieces watched; ends: {dict(tally.ends)}"
            )
            print(f"before: {before}\nafter:  {after}")
        assert tally.problems == [], tally.problems[:5]
        assert sum(tally.ends.values()) == CALLS
        assert usage(server).pages == 0 and samples["http_requests_open"] == 1, "this one"
        assert (
            samples["compiles_while_serving_total"] == counted["compiles_while_serving_total"] == 0
        )
        assert after.tasks <= before.tasks + 1 and after.threads <= before.threads + 1
        assert after.files <= before.files + 2
        assert after.memory - before.memory < 24 * MIB, "after five times the calls of the warm-up"
        ended = [_ended(samples, reason) - _ended(counted, reason) for reason in OPENAI_REASONS]
        assert sum(ended) >= tally.ends["whole"] + tally.ends["streamed"]


def _ended(samples: dict[str, float], reason: str) -> float:
    return samples[f'request_success_total{{finished_reason="{reason}"}}']
