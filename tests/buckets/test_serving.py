"""Models in buckets are served as from a disk, with the same tokens: by `LLM`, on several devices, and by a server."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.load import load_decoder
from tests.buckets.emulator import BUCKET, Emulator
from tests.doors.served import on_server
from tests.model.reference import REFERENCE, mesh_of

pytestmark = pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
MODEL = REFERENCE / "qwen2-tied"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
FLAGS = ["--tokenizer", "byte", "--max-num-seqs", "2", "--num-pages", "20", "--page-size", "8"]


def tokens_of(model: str, devices: int = 1) -> list[list[int]]:
    """The tokens that a model generates."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"tokenizer": "byte", "max_num_seqs": 2, "dtype": "float32"}
    with LLM(model, tensor_parallel_size=devices, **settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        answers = llm.generate(prompts, params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@cache
def tokens_of_files() -> list[list[int]]:
    """The tokens of the model on a disk."""
    return tokens_of(str(MODEL))


def test_safetensors(store: Emulator) -> None:
    store.put(MODEL, "models/one")
    assert tokens_of(f"gs://{BUCKET}/models/one") == tokens_of_files()


def test_orbax_on_two_devices(store: Emulator, tmp_path: Path) -> None:
    save_decoder(load_decoder(MODEL, dtype="float32", mesh=mesh_of(1)), tmp_path, "float32")
    shutil.copy(MODEL / "config.json", tmp_path)
    store.put(tmp_path, "run")
    assert tokens_of(f"s3://{BUCKET}/run", devices=2) == tokens_of_files()


def test_a_server(store: Emulator) -> None:
    store.put(MODEL, "models/one")
    name = f"s3://{BUCKET}/models/one"

    async def ask(http: httpx.AsyncClient) -> httpx.Response:
        body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 2}
        return await http.post("/v1/completions", json=body)

    answer = on_server(["--model", name, *FLAGS], ask)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
