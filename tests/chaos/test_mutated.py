"""Mutated inputs by the thousand: GGUF files, schemas, messages of a cluster, bodies of each route.

Each ends in an answer or in an error of its own kind: no other exception, no status of 500, no growth.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from orca_jax.cluster.messages import (
    Hello,
    HostDevices,
    InvalidMessageError,
    Serving,
    WorkerBeat,
    WorkerFailed,
    decode_to_leader,
    encode,
)
from orca_jax.helpers.gguf_file.header import read_header
from orca_jax.model.describe import read_model_config
from orca_jax.text.template_files import read_templates
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.values.errors import OrcaError
from tests.chaos.world import APIS, wait_calm
from tests.mutations import mutate_bytes, mutate_gguf, mutate_json
from tests.serve.running import MODEL, Server
from tests.text.schemas.random_schemas import random_schema
from tests.text.test_gguf_texts import add_fields

NUM_FILES = 2_000
NUM_SCHEMAS = 3_000
NUM_MESSAGES = 2_000
NUM_BODIES = 600
MIB = 2**20
WIDTH = 256  # of a super block of K-quants


def resident() -> int:
    """Bytes of this process."""
    size: int = psutil.Process().memory_info().rss
    return size


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with matrices in Q4_K and Q6_K, as mixtures of K-quants have them."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(15)
    writer.add_eos_token_id(5)
    add_fields(writer)
    for name in ("token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output"):
        kind = Kind.Q6_K if "attn_v" in name else Kind.Q4_K
        writer.add_tensor(f"{name}.weight", blocks(kind), raw_dtype=kind)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", blocks(Kind.Q4_K), raw_dtype=Kind.Q4_K)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def blocks(kind: Kind) -> np.ndarray:
    """Zeros of a square matrix in the blocks of a type."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((WIDTH, WIDTH // numbers * size), np.uint8)


@pytest.mark.timeout(1200)
def test_files_of_k_quants(k_quants: bytes, tmp_path: Path) -> None:
    """Header, configuration, template and tokenizer of a mutated file are read, or refused by name."""
    draw = random.Random(1)
    path = tmp_path / "model.gguf"
    read: Callable[[], object]
    ends = {"read": 0, "refused": 0}
    before = 0
    for number in range(NUM_FILES):
        path.write_bytes(mutate_gguf(k_quants, draw))
        for read in (
            lambda: read_header(path),
            lambda: read_model_config(str(path)),
            lambda: read_templates(str(path), None),
            lambda: load_tokenizer(str(path)),
        ):
            try:
                read()
                ends["read"] += 1
            except OrcaError as error:
                assert str(path) in str(error) or "model.gguf" in str(error), error
                ends["refused"] += 1
        if number == NUM_FILES // 4:
            before = resident()
    assert min(ends.values()) > NUM_FILES // 10, ends
    assert resident() - before < 200 * MIB


def check_answer(server: Server, path: str, content: bytes) -> int:
    """Send a body; return the status of its answer, which is never one of the server's own faults."""
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (
        f"{path} {answer.status_code} {answer.text[:300]} for {content[:2000]!r}"
    )
    return answer.status_code


@pytest.mark.timeout(1800)
def test_schemas(server: Server) -> None:
    draw = random.Random(2)
    statuses: set[int] = set()
    before = server_bytes(server)
    for number in range(NUM_SCHEMAS):
        schema = json.dumps(random_schema(number)).encode()
        if number % 3:
            schema = mutate_json(schema, draw)
        form = b'{"type": "json_schema", "json_schema": {"name": "a", "schema": ' + schema + b"}}"
        body = b'{"prompt": "x", "max_tokens": 2, "response_format": ' + form + b"}"
        statuses.add(check_answer(server, "/v1/completions", body))
    assert statuses == {200, 400}
    wait_calm(server)
    assert server_bytes(server) - before < 300 * MIB


def server_bytes(server: Server) -> int:
    """Resident bytes of the server's processes."""
    parent = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))


def test_messages_of_a_cluster() -> None:
    """A mutated message is one of the messages, or an error of the decoder that the control thread catches."""
    draw = random.Random(3)
    whole = (
        Hello(9, "0.1", "ab", 1, 2, "host", "machine", 5, 2, True),
        HostDevices("cpu", 2**30),
        Serving(),
        WorkerBeat(5, 4, 0.5, 10.0, ""),
        WorkerFailed("a reason", "model", True),
    )
    ends = {"read": 0, "refused": 0}
    for _ in range(NUM_MESSAGES):
        payload = mutate_bytes(encode(draw.choice(whole)), draw)
        try:
            decode_to_leader(payload)
            ends["read"] += 1
        except InvalidMessageError:
            ends["refused"] += 1
    assert min(ends.values()) > NUM_MESSAGES // 50, ends


ROUTES: dict[str, dict[str, Any]] = {
    **APIS,
    "/v1/responses/input_tokens": APIS["/v1/responses"],
    "/v1/embeddings": {"input": ["x", "y"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/chat/completions/render": APIS["/v1/chat/completions"],
    "/v1/messages/count_tokens": APIS["/v1/messages"],
    "/playground/burst": {"requests": [[3, 4]], "seed": 1},
    "/playground/page": {"arrivals": [], "iterations": [], "ends": []},
}
FIELDS: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.5,
    "stop": ["a"],
    "logit_bias": {"5": 1},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "json_object"},
    "metadata": {"a": "b"},
    "stream": False,
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ROUTES)
def test_bodies(path: str, server: Server) -> None:
    draw = random.Random(4)
    before = server_bytes(server)
    whole = {"model": MODEL, **ROUTES[path]}
    for _ in range(NUM_BODIES):
        names = draw.sample(list(FIELDS), draw.randrange(4))
        body = {**whole, **{name: FIELDS[name] for name in names}}
        content = mutate_json(json.dumps(body).encode(), draw)
        if draw.random() < 0.3:
            content = mutate_bytes(content, draw)
        check_answer(server, path, content)
    wait_calm(server)
    assert server_bytes(server) - before < 100 * MIB
