"""Rows of batch files with decisions have the answers of the server."""

import json
from pathlib import Path
from typing import Any

import httpx

from orca_jax.batch.run import run_batch
from tests.batch.world import run, settings, write
from tests.serve.running import Server

QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Broken?"},
    {"type": "score", "instructions": "How bad?", "levels": ["low", "high"]},
]


def line(number: int, **body: Any) -> bytes:
    fields = {"input": f"state {number}", "questions": QUESTIONS, **body}
    row = {"custom_id": str(number), "method": "POST", "url": "/v1/decisions", "body": fields}
    return json.dumps(row).encode()


def test_rows_are_decided_as_the_server_does(tmp_path: Path, idle_server: Server) -> None:
    lines = [line(1), line(2), line(3, made_up=1), line(4, questions=[])]
    source = write(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    one, two, *wrong = run(source, output)
    for number, row in ((1, one), (2, two)):
        body = json.loads(line(number))["body"]
        served = httpx.post(f"{idle_server.url}/v1/decisions", json=body).json()
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["answers"] == served["answers"]
    assert [row["response"]["status_code"] for row in wrong] == [400, 400]
    again = run_batch(settings(source, tmp_path / "again.jsonl")).result
    assert again["completion_tokens"] == 4
    assert again["prompt_tokens"] > 0
