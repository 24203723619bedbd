"""Pages in files with real executors: a later engine has the same tokens, on other devices, too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.engine import Engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.tiers.blocks import BlockAt, BlockMover
from orca_jax.exec.tiers.device import DeviceTier
from orca_jax.exec.tiers.memory import MemoryTier
from orca_jax.exec.tiers.store import PageStore
from orca_jax.sched import states
from orca_jax.sched.prefixes.outer import OuterPages
from orca_jax.values.request import SamplingParams
from tests.covering import slow
from tests.exec.test_groups import poisoned
from tests.model.states.hybrids import NEW
from tests.model.states.test_engine import alone, engine_of
from tests.model.states.test_engine import run as run_states
from tests.model.states.test_launches import executor_of, record
from tests.test_same_tokens import Job, greedy_jobs, make_engine, run

pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")

Open = Callable[..., Any]


@pytest.fixture
def opened(
    tmp_path: Path, program_cache: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Makes an engine with a folder of pages, which are always worth reading."""
    monkeypatch.setattr(PageStore, "seconds", lambda self, number: 0.0)
    made = contextmanager(make_engine)

    @contextmanager
    def opened(name: str, devices: int = 1, **settings: object) -> Iterator[Engine]:
        folder = str(tmp_path / "kv")
        with made(name, program_cache, devices, "chunked", kv_disk=folder, **settings) as engine:
            yield engine
            assert engine.outer is not None
            engine.outer.close()

    return opened


@pytest.mark.parametrize(
    ("name", "before", "after", "settings"),
    [
        ("gemma2", 1, 2, {}),
        slow("qwen3", 2, 1, {}),
        slow("qwen3", 1, 1, {"kv_cache_dtype": "int8"}),
        slow("qwen3", 1, 1, {"kv_cache_dtype": "fp8"}),
        slow("qwen3", 1, 1, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}),
        slow("qwen3", 1, 1, {"pipeline_parallel_size": 2}),
    ],
)
def test_a_later_engine_has_the_same_tokens(
    opened: Open, name: str, before: int, after: int, settings: dict[str, Any]
) -> None:
    jobs, expected = greedy_jobs(name)
    with opened(name, before, page_size=4, **settings) as engine:
        tokens = run(engine, jobs)
    if not settings:
        assert tokens == expected
    with opened(name, after, page_size=4, **settings) as engine:
        assert run(engine, jobs) == tokens
        assert engine.outer.num_restored > 0
        assert engine.stats.cache_hits >= 4 * len(jobs)


def test_preempted_requests_read_their_pages_back(
    opened: Open, program_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted requests are swapped: the pages that others took from them are computed again without tiers alone."""

    def save_now(outer: OuterPages, requests: object) -> None:
        outer.save()
        assert outer._tier.wait_for_room(60)

    monkeypatch.setattr(OuterPages, "save_between", save_now)
    params = SamplingParams(max_tokens=36, temperature=0, ignore_eos=True)
    jobs = [Job(tuple(range(first, first + 13)), params) for first in (30, 60)]
    scarce = {"page_size": 4, "num_pages": 14}  # both requests have twelve pages at their end
    with contextmanager(make_engine)("qwen3", program_cache, 1, "chunked", **scarce) as engine:
        expected = run(engine, jobs)
        computed = engine.executor.stats.tokens
        assert engine.stats.preemptions
    with opened("qwen3", **scarce) as engine:
        assert run(engine, jobs) == expected
        assert engine.stats.preemptions
        assert engine.outer.num_restored >= 3
        saved = computed - engine.executor.stats.tokens
        assert saved == 4 * engine.outer.num_restored


def mover_of(engine: Engine) -> BlockMover:
    assert isinstance(engine.executor, JaxExecutor)
    return BlockMover(engine.executor.stages)


def test_blocks_are_written_as_they_were_read(opened: Open) -> None:
    with opened("qwen3") as engine:
        run(engine, greedy_jobs("qwen3")[0])
        mover = mover_of(engine)
        blocks = [BlockAt(0, block) for block in (3, 7, 1, 0, 9)]
        payloads = [b"".join(payload) for payload in mover.read(blocks)()]
        others = [BlockAt(0, block) for block in (20, 21, 22, 23, 24)]
        arrays = [mover.convert(0, payload) for payload in payloads]
        mover.write(list(zip(others, arrays, strict=True)))
        assert [b"".join(payload) for payload in mover.read(others)()] == payloads
        assert [b"".join(payload) for payload in mover.read(blocks)()] == payloads
        with pytest.raises(ValueError, match="bytes of numbers, not"):
            mover.convert(0, payloads[0] + b"\0")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_blocks_with_numbers_that_are_not_finite_are_not_kept(opened: Open, bad: float) -> None:
    with opened("qwen3") as engine:
        stage = engine.executor.stages[0]
        (pages,) = stage.state.caches.pages
        arrays = jax.tree.map(jnp.zeros_like, pages)
        num_blocks = engine.pool.kv.num_blocks[0]
        spoiled = arrays._replace(v=arrays.v.at[2 + num_blocks, 0, 0, 0].set(bad))
        stage.state = stage.state._replace(caches=stage.state.caches._replace(pages=(spoiled,)))
        zeros, none = mover_of(engine).read([BlockAt(0, 1), BlockAt(0, 2)])()
        assert none is None and zeros is not None
        assert not np.frombuffer(b"".join(zeros), np.uint8).any()


@pytest.mark.parametrize(
    ("name", "form", "shards", "stages"),
    [
        ("lfm3-1", "switched", 1, 1),
        slow("qwen3_5_text-0", "switched", 2, 1),
        slow("bamba-2", "unrolled", 1, 2),
        slow("deepseek_v3-0", "switched", 1, 1),
    ],
)
def test_states_and_latents_come_back(
    name: str,
    form: str,
    shards: int,
    stages: int,
    program_cache: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later engine finds the pages and the snapshots of the first one in memory that holds no number else."""
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    monkeypatch.setattr(states, "WORTH_A_SNAPSHOT", 4)
    executor = executor_of(
        name, form, shards, stages, program_cache, tmp_path, copies=True, moves=True
    )
    prompt, _ = max(record(name), key=lambda each: len(each[0]))
    wanted = alone(poisoned(executor), stages, prompt)
    memory = MemoryTier(2**30)
    tokens: dict[str, list[int]] = {}
    for number in range(2):
        engine = engine_of(poisoned(executor), stages, 0, budget=10, reuses=True)
        tier = DeviceTier(executor.stages, [memory])
        outer = OuterPages(engine.pool.kv, tier, lambda tokens: 1e9)
        assert engine.pool.reuse is not None
        engine.pool.reuse.outer = outer
        params = SamplingParams(max_tokens=NEW, temperature=0)
        engine.add_request(str(number), prompt, params)
        run_states(engine, tokens)
        outer.close()
    assert tokens == {"0": wanted, "1": wanted}
    assert outer.num_restored > 1 and engine.stats.cache_hits >= 8
