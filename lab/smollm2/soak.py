"""Run a server on a real model for some minutes under mixed calls, and check each answer and the memory.

The model is `smollm2`, dequantised by `orca-jax convert`, so that it takes adapters and new weights. Callers send
chats, responses, messages, tools, JSON schemas and embeddings, hang up in the middle of streams, use an adapter, and
replace the weights by equal ones. A scheduler from outside the package (`lab/policies/prefill_first.py`) selects all of
them. Every greedy text must be that of a first call. The last line is JSON; the exit status is 1 if a check failed.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from orca_jax.flags import add_number
from orca_jax.helpers.bundled import smollm2_file
from orca_jax.helpers.reporting import hardware
from orca_jax.text.template_files import read_templates
from orca_jax.tools.bench.memory import resident_bytes
from orca_jax.values.errors import OrcaError

MIB = 2**20
POLICY = "lab/policies/prefill_first.py:PrefillFirst"
QUESTIONS = (
    "What is the capital of France?",
    "How many days are in a week?",
    "Write a short list of three fruits.",
    "What is the opposite of hot?",
    "Why is the sky blue?",
    "Tell me a story about a robot that learns to paint.",
)
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 20}}, "required": ["answer"],
          "additionalProperties": False}  # fmt: skip
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {}},
}
NEW = 48  # tokens
NUM_PAGES = 16  # few, so that all of them are soon in use, and requests are preempted
ADAPTER = "soak-adapter"
GROWTH = 64  # MiB, from the second third of the time to its last sixth


@dataclass
class Soak:
    """A server under mixed calls.

    Attributes:
        url: of the server.
        admin: the key of the route of weights.
        first: greedy texts of first calls, by kind and question.
        ends: finished calls by kind.
        problems: descriptions of wrong answers.
    """

    url: str
    admin: str
    first: dict[tuple[str, str], str] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def call(self, http: httpx.Client, kind: str, question: str, draw: random.Random) -> None:
        """Make one call, and check its answer."""
        if kind == "abort":
            self._hang_up(http, question, draw)
        elif kind == "embeddings":
            body = {"model": "smollm2", "input": [question]}
            answer = self._post(http, "/v1/embeddings", body)
            self._check(kind, question, json.dumps(answer["data"][0]["embedding"][:8]))
        else:
            path, body, text = CALLS[kind](question)
            self._check(kind, question, text(self._post(http, path, body)))
        self.ends[kind] += 1

    def _post(self, http: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
        answer = http.post(path, json=body)
        if answer.status_code != 200:
            raise OrcaError(f"{path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def _hang_up(self, http: httpx.Client, question: str, draw: random.Random) -> None:
        """Read a part of a stream, and close the connection."""
        body = {**_chat(question), "stream": True, "max_tokens": 400}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > draw.randrange(40):
                    return

    def _check(self, kind: str, question: str, text: str) -> None:
        expected = self.first.setdefault((kind, question), text)
        if text != expected:
            self.problems.append(f"{kind}, {question}: {text!r}, first {expected!r}")

    def work(self, seed: int) -> None:
        """Call until the end."""
        draw = random.Random(seed)
        kinds = [*CALLS, "abort", "embeddings"]
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while not self.over.is_set():
                kind = draw.choice(kinds)
                try:
                    self.call(http, kind, draw.choice(QUESTIONS), draw)
                except (httpx.HTTPError, OrcaError, KeyError, ValueError) as error:
                    self.problems.append(f"{kind}: {type(error).__name__}: {error}")

    def update_weights(self, folder: str, every: float) -> None:
        """Replace the weights by equal ones, until the end."""
        headers = {"authorization": f"Bearer {self.admin}"}
        with httpx.Client(base_url=self.url, timeout=300, headers=headers) as http:
            while not self.over.wait(every):
                answer = http.post("/update_weights_from_disk", json={"model_path": folder})
                if answer.status_code != 200:
                    self.problems.append(f"weights: {answer.status_code} {answer.text[:300]}")
                self.ends["weights"] += 1


Call = tuple[str, dict[str, Any], Callable[[Any], str]]


def _chat(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "smollm2", "messages": messages, "max_tokens": NEW, "temperature": 0, **fields}


def _chat_text(answer: Any) -> str:
    choice = answer["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise OrcaError(f"finish_reason {choice['finish_reason']}")
    return str(choice["message"]["content"])


def _as_json(answer: Any) -> str:
    text = _chat_text(answer)
    if not isinstance(json.loads(text)["answer"], str):
        raise OrcaError(f"not of the schema: {text}")
    return text


def _schema(question: str) -> Call:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    return "/v1/chat/completions", _chat(question, response_format=form), _as_json


def _tools(question: str) -> Call:
    tools = [{"type": "function", "function": TOOL}]
    return "/v1/chat/completions", _chat(question, tools=tools, tool_choice="none"), _chat_text


def _messages(question: str) -> Call:
    return "/v1/messages", _chat(question), lambda answer: str(answer["content"][0]["text"])


def _responses(question: str) -> Call:
    body = {"model": "smollm2", "input": question, "max_output_tokens": NEW, "temperature": 0}
    return "/v1/responses", body, lambda answer: str(answer["output"][-1]["content"][0]["text"])


CALLS: Mapping[str, Callable[[str], Call]] = {
    "chat": lambda question: ("/v1/chat/completions", _chat(question), _chat_text),
    "adapter": lambda question: (
        "/v1/chat/completions",
        _chat(question, model=ADAPTER),
        _chat_text,
    ),
    "schema": _schema,
    "tools": _tools,
    "messages": _messages,
    "responses": _responses,
}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this program."""
    add_number(parser, "--minutes", 30.0, "time under load")
    add_number(parser, "--callers", 6, "callers at a time")
    add_number(parser, "--port", 8790, "port of the server")
    add_number(parser, "--every", 45.0, "seconds between weights", metavar="S")


def run(args: argparse.Namespace) -> int:
    """Start the server, call it, and print what was found. Return 1 if a check failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = _start(folder, args.port)
        try:
            found = _soak(server, folder, args)
        finally:
            server.terminate()
            server.wait(60)
    print(json.dumps(found))
    return int(bool(found["problems"]) or found["growth_mib"] > GROWTH)


def _start(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """Write the model, an adapter and a key, and start the server."""
    module = [sys.executable, "-m"]
    model = folder / "smollm2"
    convert = [*module, "orca_jax.cli", "convert", "--model", "smollm2", "--output", str(model)]
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
    _write_adapter(folder / "adapters" / ADAPTER)
    templates, _ = read_templates(str(smollm2_file()), None)
    template = folder / "chat.jinja"
    template.write_text(templates["default"], encoding="utf-8")
    keys = folder / "admin.keys"
    keys.touch(mode=0o600)
    keys.write_text("soak-admin\n", encoding="utf-8")
    flags = [
        f"--model={model}", f"--tokenizer={smollm2_file()}", f"--chat-template={template}",
        "--served-model-name=smollm2", f"--port={port}",
        "--max-num-seqs=8", "--max-model-len=1024", f"--num-pages={NUM_PAGES}",
        "--enable-lora", f"--lora-dir={folder / 'adapters'}",
        f"--lora-modules={ADAPTER}={folder / 'adapters' / ADAPTER}", f"--admin-key-file={keys}",
        f"--weights-root={folder}", f"--scheduler={POLICY}", "--no-log-requests",
    ]  # fmt: skip
    return subprocess.Popen([*module, "orca_jax.serve", *flags])


def _write_adapter(folder: Path) -> None:
    """Write a random adapter of the attention of SmolLM2-135M, in PEFT's format."""
    from safetensors.numpy import save_file

    draw = np.random.default_rng(0)
    tensors = {}
    for layer in range(30):
        for name, outputs in (("q_proj", 576), ("v_proj", 192)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = draw.normal(0, 0.02, (4, 576)).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = draw.normal(0, 0.02, (outputs, 4)).astype(
                np.float32
            )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _soak(
    server: "subprocess.Popen[bytes]", folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    soak = Soak(f"http://127.0.0.1:{args.port}", "soak-admin")
    _wait(server, soak.url)
    with httpx.Client(base_url=soak.url, timeout=120) as http:
        for kind in (*CALLS, "embeddings"):
            for question in QUESTIONS:
                soak.call(http, kind, question, random.Random(0))
    threads = [threading.Thread(target=soak.work, args=(seed,)) for seed in range(args.callers)]
    threads.append(threading.Thread(target=soak.update_weights, args=("smollm2", args.every)))
    for thread in threads:
        thread.start()
    sizes = _watched(server, 60 * args.minutes)
    early = min(sizes[len(sizes) // 3 : len(sizes) // 2])
    late = min(sizes[-len(sizes) // 6 :])
    soak.over.set()
    for thread in threads:
        thread.join()
    if server.poll() is not None:
        soak.problems.append(f"the server ended with status {server.returncode}")
    return {
        "minutes": args.minutes,
        "calls": dict(soak.ends),
        "problems": soak.problems[:20],
        "num_problems": len(soak.problems),
        "resident_mib": [early // MIB, late // MIB],
        "sizes_mib": [size // MIB for size in sizes[:: max(1, len(sizes) // 60)]],
        "growth_mib": (late - early) // MIB,
        "hardware": hardware(),
    }


def _watched(server: "subprocess.Popen[bytes]", seconds: float) -> list[int]:
    """Watch the server for some time; return its resident bytes, every two seconds.

    The least size of a part of the time counts: while weights are replaced, the server holds both.
    """
    end = time.monotonic() + seconds
    sizes = []
    while time.monotonic() < end:
        sizes.append(resident_bytes(server.pid))
        time.sleep(2)
    return sizes


def _wait(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until the server is ready. Raises OrcaError if it ends before."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise OrcaError(f"the server ended with status {server.returncode}")
