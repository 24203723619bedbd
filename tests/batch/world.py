"""Inputs of every kind, runs of them, and what the toy model should have said."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orca_jax.batch.args import parse_args
from orca_jax.batch.config import BatchConfig
from orca_jax.batch.run import run_batch
from orca_jax.values.request import SamplingParams
from tests.sim.oracle import toy_generate
from tests.text.lasting import lasting_template

MODEL = "preset:toy"
EOS = 256

# Ten kinds of bad lines, by what their error is called; `{}` is the line's number.
BAD: Mapping[str, bytes] = {
    "invalid_json": b'{"custom_id": "cut off',
    "not_an_object": b'["custom_id", "POST"]',
    "invalid_utf8": b'{"custom_id": "\xff\xfe"}',
    "empty_line": b"",
    "missing_required_parameter": b'{"method": "POST", "url": "/v1/completions", "body": {}}',
    "duplicate_custom_id": b'{"custom_id": "first", "prompt": "again"}',
    "invalid_method": b'{"custom_id": "{}", "method": "GET", "url": "/v1/completions", "body": {}}',
    "invalid_url": b'{"custom_id": "{}", "method": "POST", "url": "/v1/embeddings", "body": {}}',
    "400 invalid_request_error": b'{"custom_id": "{}", "prompt": "hot", "temperature": 9}',
    "404 model_not_found": b'{"custom_id": "{}", "prompt": "who", "model": "somebody-else"}',
}


def good_line(number: int, max_tokens: int) -> bytes:
    body = {"model": MODEL, "prompt": f"p{number}", "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(row).encode()


def mixed_lines(count: int, every: int) -> list[bytes]:
    """Good lines, and after every `every - 1` of them a bad one, the kinds in turn. The first line's id is "first"."""
    first = good_line(1, 3).replace(b'"row-1"', b'"first"')
    kinds = list(BAD.values())
    lines = [
        kinds[number // every % len(kinds)].replace(b"{}", b"%d" % number)
        if number % every == 0
        else good_line(number, 1 + number % 9)
        for number in range(2, count + 1)
    ]
    return [first, *lines]


def check_mixed(output: Path, lines: Sequence[bytes], every: int) -> None:
    """Exactly one whole row for each line, in order; what it says is what its line deserves."""
    data = output.read_bytes()
    assert data.endswith(b"\n")
    rows = [json.loads(line) for line in data.splitlines()]
    assert [row["id"].rpartition("_")[2] for row in rows] == [
        str(number) for number in range(1, len(lines) + 1)
    ]
    kinds = list(BAD)
    for number, row in enumerate(rows, start=1):
        if number > 1 and number % every == 0:
            assert kind_of(row) == kinds[number // every % len(kinds)], row
        else:
            assert row["custom_id"] == ("first" if number == 1 else f"row-{number}")
            max_tokens = 3 if number == 1 else 1 + number % 9
            (choice,) = row["response"]["body"]["choices"]
            assert choice["token_ids"] == toy_ids(f"p{number}", max_tokens)


def kind_of(row: Mapping[str, Any]) -> str | None:
    """What its error is called; None for an answer."""
    if row["error"] is not None:
        assert row["response"] is None
        return str(row["error"]["code"])
    status, body = row["response"]["status_code"], row["response"]["body"]
    return None if status == 200 else f"{status} {body['error']['code'] or body['error']['type']}"


def toy_ids(prompt: str, max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return toy_generate(list(prompt.encode()), params, vocab_size=257, eos_token_ids={EOS})


def write(path: Path, lines: Sequence[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def settings(source: Path, output: Path, *flags: str) -> BatchConfig:
    return parse_args(
        ["-i", str(source), "-o", str(output), "--model", MODEL, "--no-progress", *flags]
    )


def run(source: Path, output: Path, *flags: str) -> list[dict[str, Any]]:
    """The rows of a run in this process."""
    with lasting_template():
        run_batch(settings(source, output, *flags))
    # texts may hold what breaks lines of str
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def start(source: Path, output: Path, *flags: str) -> subprocess.Popen[bytes]:
    """The same in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "orca_jax.batch",
        "-i",
        str(source),
        "-o",
        str(output),
        "--model",
        MODEL,
    ]
    return subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill_within(
    process: subprocess.Popen[bytes], output: Path, rows: int, chance: random.Random
) -> None:
    """SIGKILL at a random moment after some of the next `rows` rows were written, or when the process has ended."""
    lines = count_lines(output) + chance.randrange(rows)
    deadline = time.monotonic() + 120
    while process.poll() is None and count_lines(output) <= lines:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(chance.random() * 0.01)
    process.kill()
    process.communicate()


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if os.path.exists(path) else 0
