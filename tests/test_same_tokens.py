"""Same tokens, whatever happens around a request: the reference's, for every scheduler, bucket, mesh and batch mate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from orca_jax.build import build_engine
from orca_jax.config import EngineConfig, SchedulerName
from orca_jax.engine import Engine
from orca_jax.request import SamplingParams

REFERENCE = Path(__file__).parent / "fixtures" / "reference"
SCHEDULERS: tuple[SchedulerName, ...] = ("orca", "request_level")


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int = 0


def greedy_jobs(name: str) -> tuple[list[Job], list[list[int]]]:
    """Four prompts of a reference model, and what generate() made of them."""
    expected = np.load(REFERENCE / name / "expected.npz")
    answers = [expected[f"greedy_{i}"].tolist() for i in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [Job(tuple(expected[f"ids_{i}"].tolist()), params) for i in range(4)], answers


def make_engine(
    name: str, cache: str, devices: int = 1, scheduler: SchedulerName = "orca", **settings: int
) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(REFERENCE / name),
        tokenizer="byte",
        dtype="float32",
        tensor_parallel_size=devices,
        scheduler=scheduler,
        compile_cache=cache,
        progress=False,
        **{"max_num_seqs": 4, "page_size": 8, "num_pages": 60, "max_num_batched_tokens": 16, **settings},
    )
    engine = build_engine(config).engine
    yield engine
    engine.pool.check_integrity()
    assert not engine.has_work
    assert engine.pool.kv.num_held_rows == 0
    engine.executor.close()


def run(engine: Engine, jobs: Sequence[Job]) -> list[list[int]]:
    """Tokens of each job; one arrives before step `at_step`."""
    tokens: list[list[int]] = [[] for _ in jobs]
    open_jobs, step = len(jobs), 0
    while open_jobs:
        for index, job in enumerate(jobs):
            if job.at_step == step:
                engine.add(str(index), job.prompt, job.params)
        for update in engine.step():
            tokens[int(update.request_id)].extend(update.new_ids)
            open_jobs -= update.finish_reason is not None
        step += 1
        assert step < 500, "a request never ended"
    return tokens


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2-12-heads", "llama-12-heads-3-groups"])
def test_greedy_tokens_equal_generate(name: str, devices: int, scheduler: SchedulerName, program_cache: str) -> None:
    jobs, answers = greedy_jobs(name)
    for engine in make_engine(name, program_cache, devices, scheduler):
        for job, answer in zip(jobs, answers, strict=True):
            assert run(engine, [job]) == [answer], "alone"
        assert run(engine, jobs) == answers, "together"
        assert run(engine, jobs[::-1] * 2) == answers[::-1] * 2, "more than fit in a batch"
        late = [Job(job.prompt, job.params, at_step=3 * i) for i, job in enumerate(jobs)]
        assert run(engine, late) == answers, "joining while others run"


@pytest.mark.parametrize("name", ["gpt2-25-heads", "gpt2-untied-sharded", "llama-25-heads", "llama-biases-sharded"])
def test_other_shapes_through_the_engine(name: str, program_cache: str) -> None:
    jobs, answers = greedy_jobs(name)
    for engine in make_engine(name, program_cache):
        assert run(engine, jobs) == answers


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 4}, {"max_num_batched_tokens": 64}, {"page_size": 32}])
def test_buckets_and_pages_do_not_matter(settings: dict[str, int], program_cache: str) -> None:
    jobs, answers = greedy_jobs("gpt2-12-heads")
    for engine in make_engine("gpt2-12-heads", program_cache, **settings):
        assert run(engine, jobs) == answers


@pytest.mark.parametrize("workers", [2, 3])
def test_several_iterations_in_flight(workers: int, program_cache: str) -> None:
    jobs, answers = greedy_jobs("llama-12-heads-3-groups")
    for engine in make_engine("llama-12-heads-3-groups", program_cache, n_workers=workers, max_num_seqs=2):
        late = [Job(job.prompt, job.params, at_step=i) for i, job in enumerate(jobs)]
        assert run(engine, late) == answers


def test_few_slots_and_pages_only_make_requests_wait(program_cache: str) -> None:
    """33 + 12 tokens need 45 slots, 6 pages of 8; barely more are there."""
    jobs, answers = greedy_jobs("gpt2-12-heads")
    for engine in make_engine("gpt2-12-heads", program_cache, num_pages=10, n_slots=50):
        assert run(engine, jobs) == answers


@pytest.mark.parametrize("devices", [1, 2])
def test_seeded_sampling_does_not_depend_on_mates_or_scheduler(devices: int, program_cache: str) -> None:
    jobs = [
        Job(job.prompt, SamplingParams(max_tokens=8, temperature=t, top_k=k, top_p=p, seed=s, ignore_eos=True), at)
        for job, t, k, p, s, at in zip(
            greedy_jobs("gpt2-12-heads")[0], (1.0, 0.7, 1.5, 0.0), (0, 5, 0, 0), (1.0, 1.0, 0.8, 1.0),
            (1, 2, 2**62, -5), (0, 1, 2, 3), strict=True,
        )
    ]  # fmt: skip
    seen = []
    for scheduler in SCHEDULERS:
        for engine in make_engine("gpt2-12-heads", program_cache, devices, scheduler):
            seen.append([run(engine, [Job(job.prompt, job.params)])[0] for job in jobs])
            seen.append(run(engine, jobs))
    assert all(tokens == seen[0] for tokens in seen)
    assert len({tuple(tokens) for tokens in seen[0]}) == 4
