"""Windows in plans: layer-tokens of a request, requests that fit, and times, by hand and by the engine's own pools."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.capacity import CONTEXTS, PATTERNS, held
from orca_jax.assembly.choices import PAGE_SIZE, choices_of
from orca_jax.assembly.executor import place_model
from orca_jax.assembly.resolve import resolve
from orca_jax.model.describe import read_model_config
from orca_jax.sched.kv import KVManager
from orca_jax.tools.plan.accelerators import ACCELERATORS, GIB, Accelerator
from orca_jax.tools.plan.memory import Demand, Split, fit
from orca_jax.tools.plan.roofline import even_work
from orca_jax.values.cache_spec import LayerCache, LayerGroup, PageShape, form_groups
from orca_jax.values.config import EngineConfig, ModelConfig

GEMMA3_27B = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
}
DEMAND = Demand("bfloat16", "bfloat16", 0.9, max_num_seqs=64, max_model_len=32768)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("gemma3")
    (directory / "config.json").write_text(json.dumps(GEMMA3_27B))
    return read_model_config(str(directory))


def blocks_held(groups: Sequence[LayerGroup], context: int, page_size: int) -> int:
    """The blocks that the engine holds for a request after a prompt in chunks, and one token more."""
    kv = KVManager((3000,), page_size, 1, groups=groups, longest=512)
    row, start = kv.acquire_row(), 0
    while start < context:
        size = min(512, context - 1 - start) or 1
        kv.leave(row, start)
        kv.allocate(row, start + size)
        start += size
    assert isinstance(kv.num_free_blocks, int)
    return 3000 - kv.num_free_blocks


def test_a_request_of_gemma_3_holds_little_more_than_its_windows(gemma3: ModelConfig) -> None:
    """10 layers keep all tokens and 52 the last 1,024; blocks have 10 pages, so 8 of 70 are padding."""
    kind = ACCELERATORS["h200"]
    found = fit(gemma3, Split(1, 1), kind, replace(DEMAND, context=32768))
    assert not found.shortage
    assert [len(group.layers) for group in found.cache.groups] == [10, 9, 9, 9, 9, 8, 8]
    needed = 10 * 32768 + 52 * 1024
    assert needed <= found.request_layer_tokens <= 1.05 * needed
    held = blocks_held(found.cache.groups, 32768, PAGE_SIZE)
    assert found.request_layer_tokens == 10 * PAGE_SIZE * held


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_one_start_holds_requests_of_any_length(
    name: str, context: int, gemma3: ModelConfig
) -> None:
    """Whether all are short or all are long, by `plan` and by the pools; a share above 1 would be a wrong count."""
    pattern = PATTERNS[name]
    assert list(gemma3.layer_caches) == PATTERNS["Gemma 3 27B"].layers
    assert pattern.share <= held(pattern, context)["share"] <= 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.sampled_from([1, 4, 16]), st.integers(2, 1500))
def test_blocks_in_decode_are_those_of_the_engine(
    window: int, page_size: int, context: int
) -> None:
    shape = PageShape(1, 1)
    groups = form_groups([LayerCache(shape), LayerCache(shape, window)], 1 << 20)
    assert sum(group.blocks_in_decode(context, page_size) for group in groups) == blocks_held(
        groups, context, page_size
    )
    for group in groups:
        assert group.blocks_in_decode(context, page_size) <= group.most_blocks(
            context, 1, page_size
        )


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 2)])
def test_blocks_are_those_of_the_engine(
    tensor: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "head_dim": 32,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 256,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_27B | small | heads))
    model, number, memory = read_model_config(str(tmp_path)), tensor * stages, GIB // 10
    monkeypatch.setattr("orca_jax.exec.host.free_memory", lambda: memory)
    config = EngineConfig(
        max_num_seqs=8, tensor_parallel_size=tensor, pipeline_parallel_size=stages
    )
    loading = {"dtype": "float32", "load_format": "dummy", "seed": 0}
    placed = place_model(
        str(tmp_path), model, devices=jax.devices()[:number], num_stages=stages, **loading
    )
    cache = resolve(choices_of(config), 4096, placed).cache
    kind = Accelerator("cpu", memory / number, 0, 0, 0, number, "this machine")
    demand = Demand("float32", "float32", 0.9, max_num_seqs=8, max_model_len=4096)
    planned = fit(model, Split(tensor, stages), kind, demand)
    assert (planned.shortage, planned.cache.num_blocks) == (0, cache.num_blocks)
    assert planned.cache.groups == cache.groups and len(cache.groups) > 1


def test_work_within_a_window_by_hand() -> None:
    decode = even_work((None, 10), requests=3, new=1, before=99, sampled=3)
    assert (decode[None].num_tokens, decode[None].num_read) == (3, 300)
    assert (decode[10].num_read, decode[10].pairs) == (30, 30)
    prompt = even_work((None, 2), requests=1, new=5, before=0, sampled=1)
    assert (prompt[None].pairs, prompt[2].pairs, prompt[2].num_read) == (15, 1 + 2 * 4, 5)
    chunk = even_work((3, 8), requests=1, new=4, before=6, sampled=0)
    assert (chunk[3].num_read, chunk[3].pairs) == (6, 12)
    assert chunk[8].pairs == 7 + 8 + 8 + 8
