"""Contexts far beyond a window get the same tokens from blocks in groups as from one group that keeps all tokens."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from orca_jax.values.cache_spec import one_group
from orca_jax.values.request import RequestUpdate, SamplingParams
from tests.covering import slow
from tests.test_same_tokens import REFERENCE, Job, make_engine, run_updates

pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
LENGTHS = (40, 170, 97, 180)  # of prompts; the last two begin as the second one does
COUNT, LONGEST = 24, 256


@cache
def jobs() -> list[Job]:
    """Prompts in part with the same beginning. Drawn tokens follow the whole distribution."""
    ids = np.random.default_rng(1).integers(3, 97, max(LENGTHS)).tolist()
    prompts = [ids[::-1][: LENGTHS[0]], *(ids[:length] for length in LENGTHS[1:])]
    params = SamplingParams(max_tokens=COUNT, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)
    return [Job(tuple(prompt), params, at_step=2 * index) for index, prompt in enumerate(prompts)]


def directory_of(name: str, window: int, tmp_path: Path) -> str:
    """A model with random weights, as a reference model is, but with another window and more positions."""
    config = json.loads((REFERENCE / name / "config.json").read_text())
    config |= {"sliding_window": window, "max_position_embeddings": LONGEST}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def tokens_of(jobs: Sequence[Sequence[RequestUpdate]]) -> list[list[int]]:
    return [[token for update in job for token in update.new_ids] for job in jobs]


def logprobs_of(jobs: Sequence[Sequence[RequestUpdate]]) -> list[float]:
    return [entry.logprob for job in jobs for update in job for entry in update.logprobs]


CHUNKED = {"scheduler": "chunked", "max_num_batched_tokens": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("name", "window", "page_size", "settings"),
    [
        ("gemma2", 8, 4, {**CHUNKED, "num_pages": 75}),
        slow("gemma2", 24, 16, {"scheduler": "orca", "max_num_batched_tokens": 64}),
        slow("mistral-window", 16, 8, {**CHUNKED, "speculative_config": NGRAM}),
        # a long chunk holds so many pages of seven windows that no later token lacks one
        slow("gemma3", 16, 8, {**CHUNKED, "num_pages": 75, "max_num_batched_tokens": 4}),
        slow("gemma2", 16, 8, {**CHUNKED, "pipeline_parallel_size": 3, "tensor_parallel_size": 2}),
        slow("gemma2", 32, 4, {**CHUNKED, "kv_cache_dtype": "int8"}),
        slow("gemma2", 32, 16, {**CHUNKED, "kv_cache_dtype": "fp8", "cpu_products": "xla"}),
        slow("phi3-window", 12, 4, {**CHUNKED, "num_pages": 11}),
    ],
)
def test_groups_do_not_change_tokens(
    name: str,
    window: int,
    page_size: int,
    settings: dict[str, object],
    tmp_path: Path,
    program_cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks, preemption, reuse of prefixes, overlap and speculation, on one device, on several and in stages."""
    source = directory_of(name, window, tmp_path)
    devices = int(str(settings.get("tensor_parallel_size", 1)))
    own: dict[str, object] = {
        "page_size": page_size,
        "load_format": "dummy",
        "strict_compile": True,
        "num_pages": 900,
    }
    own |= settings
    scheduler = own.pop("scheduler")
    own.pop("tensor_parallel_size", None)
    found, has_room = [], own["num_pages"] == 900
    for engine in make_engine(source, program_cache, devices, scheduler, **own):  # type: ignore[arg-type]
        assert len(engine.pool.kv.groups) > 1 or engine.pool.kv.groups[0].window == window
        for _ in range(2):
            found.append(run_updates(engine, jobs()))
        assert not has_room or scheduler != "chunked" or engine.pool.num_cache_hits > 0
        assert has_room or engine.pool.num_preemptions > 0
    monkeypatch.setattr(
        "orca_jax.assembly.resolve.form_groups", lambda layers, *_, **__: one_group(layers)
    )
    for engine in make_engine(
        source, program_cache, devices, scheduler, **{**own, "num_pages": 900}
    ):  # type: ignore[arg-type]
        assert [group.window for group in engine.pool.kv.groups] == [None]
        expected = run_updates(engine, jobs())
    for each in found:
        assert tokens_of(each) == tokens_of(expected)
        assert np.allclose(logprobs_of(each), logprobs_of(expected), atol=1e-4)
    assert len(set(tokens_of(expected)[1])) > COUNT // 3, "not the same token again and again"
