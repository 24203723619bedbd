"""A request gets the reference's tokens under every scheduler, bucket, mesh and batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from orca_jax.assembly.choices import ordering_kind, scheduler_kind
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.values.config import ORDERINGS, SCHEDULERS, EngineConfig
from orca_jax.values.request import DEFAULT_URGENCY, RequestUpdate, SamplingParams, Urgency
from tests.covering import chosen, covering, slow
from tests.model import eight_heads

REFERENCE = Path(__file__).parent / "fixtures" / "reference"
# For tests of tokens; `generate` and log probabilities are compared with the programs that users run.
quick = pytest.mark.usefixtures("quick_compiles")
few = pytest.mark.usefixtures("few_programs")
pytestmark = pytest.mark.usefixtures("compiled_when_used")


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int = 0
    urgency: Urgency = DEFAULT_URGENCY
    adapter: str | None = None


def greedy_jobs(name: str) -> tuple[list[Job], list[list[int]]]:
    """Four prompts of a reference model, and the tokens of transformers' generate()."""
    expected = np.load(REFERENCE / name / "expected.npz")
    answers = [expected[f"greedy_{i}"].tolist() for i in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [Job(tuple(expected[f"ids_{i}"].tolist()), params) for i in range(4)], answers


def make_engine(
    name: str,
    cache: str | None,
    devices: int = 1,
    scheduler: str = "orca",
    **settings: object,
) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(REFERENCE / name),
        tokenizer="byte",
        tensor_parallel_size=devices,
        scheduler=scheduler,
        compile_cache=cache,
        progress=False,
        **{
            "dtype": "float32",
            "max_num_seqs": 4,
            "page_size": 8,
            "num_pages": 60,
            "max_num_batched_tokens": 16,
            **settings,
        },
    )
    engine = build_engine(config).engine
    yield engine
    engine.pool.check_integrity()
    assert not engine.has_work
    assert engine.pool.kv.num_held_rows == 0
    engine.executor.close()


def run(engine: Engine, jobs: Sequence[Job]) -> list[list[int]]:
    """The tokens of each job."""
    return [
        [token for update in job for token in update.new_ids] for job in run_updates(engine, jobs)
    ]


def run_updates(engine: Engine, jobs: Sequence[Job]) -> list[list[RequestUpdate]]:
    """The updates of each job; a job arrives before step `at_step`."""
    updates: list[list[RequestUpdate]] = [[] for _ in jobs]
    open_jobs, step = len(jobs), 0
    while open_jobs:
        for index, job in enumerate(jobs):
            if job.at_step == step:
                engine.add_request(
                    str(index), job.prompt, job.params, urgency=job.urgency, adapter=job.adapter
                )
        for update in engine.step():
            updates[int(update.request_id)].append(update)
            open_jobs -= update.finish_reason is not None
        step += 1
        assert step < 500, "a request never ended"
    while engine.has_work:  # overlap computes past an end
        assert not engine.step()
    return updates


def check_orderings(engine: Engine, jobs: Sequence[Job], answers: list[list[int]]) -> None:
    """Check all orderings: later jobs are more urgent in every respect."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, ChunkedScheduler)
    urgent = [
        replace(job, urgency=Urgency(-i, f"tenant {i % 2}", 100.0 / (1 + i)))
        for i, job in enumerate(jobs)
    ]
    for name in ORDERINGS:
        scheduler.order_by(ordering_kind(name)())
        assert run(engine, urgent) == answers, name


GPT2, LLAMA = "gpt2-12-heads", "llama-12-heads-3-groups"


@pytest.mark.parametrize(
    ("name", "devices", "scheduler"),
    [
        *((GPT2, 1, scheduler) for scheduler in SCHEDULERS),
        slow(GPT2, 2, "orca"),
        slow(LLAMA, 1, "chunked"),
    ],
)
def test_greedy_tokens_equal_generate(
    name: str,
    devices: int,
    scheduler: str,
    program_cache: str,
    request: pytest.FixtureRequest,
) -> None:
    """GPT-2 on one device runs the programs that users run; the others show that partitioning changes no token."""
    for fixture in (
        ["few_programs"] if (name, devices) == (GPT2, 1) else ["few_programs", "quick_compiles"]
    ):
        request.getfixturevalue(fixture)
    jobs, answers = greedy_jobs(name)
    for engine in make_engine(name, program_cache, devices, scheduler):
        for job, answer in zip(jobs, answers, strict=True):
            assert run(engine, [job]) == [answer], "alone"
        check_together(engine, jobs, answers)


def check_together(engine: Engine, jobs: Sequence[Job], answers: list[list[int]]) -> None:
    """Check jobs in the batches of others."""
    assert run(engine, jobs) == answers, "together"
    assert run(engine, jobs[::-1] * 2) == answers[::-1] * 2, "more than fit in a batch"
    late = [Job(job.prompt, job.params, at_step=3 * i) for i, job in enumerate(jobs)]
    assert run(engine, late) == answers, "joining while others run"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith("gpt2"))
        for name in eight_heads.CONFIGS
    ],
)
def of_eight_heads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Job], list[list[int]]]:
    """A model with eight query heads, jobs, and their tokens without an engine."""
    directory = eight_heads.make_model(
        request.param, tmp_path_factory.mktemp("models") / request.param
    )
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(0, 300, length).tolist()) for length in (3, 17, 30)]
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    jobs = [Job(prompt, params) for prompt in prompts]
    return directory, jobs, eight_heads.greedy_tokens(directory, prompts, params.max_tokens)


@few
@quick
@pytest.mark.parametrize(
    ("devices", "scheduler"),
    [(8, "chunked"), slow(2, "orca"), slow(4, "request_level")],
)
def test_eight_devices_and_copies_of_heads(
    of_eight_heads: tuple[Path, list[Job], list[list[int]]],
    devices: int,
    scheduler: str,
    program_cache: str,
) -> None:
    """Each device has one of GPT-2's heads; of Llama's two key/value heads, four and eight devices hold copies."""
    directory, jobs, answers = of_eight_heads
    for engine in make_engine(str(directory), program_cache, devices, scheduler):
        check_together(engine, jobs, answers)


@few
@quick
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-untied-sharded", "llama-25-heads"])
def test_other_shapes_through_the_engine(name: str, program_cache: str) -> None:
    jobs, answers = greedy_jobs(name)
    for engine in make_engine(name, program_cache):
        assert run(engine, jobs) == answers


@few
@quick
@pytest.mark.parametrize(
    ("name", "tensor", "stages"),
    [("gemma2", 2, 1), slow("gpt_neox-parallel", 2, 1), slow("gemma3", 2, 2)]
    + [slow(name, 2, 1) for name in ("qwen3-mixed-windows", "phi3-longrope", "opt")]
    + [slow("qwen2_moe", 2, 2)],
)
def test_families_in_chunks_and_pages_with_prefixes(
    name: str, tensor: int, stages: int, program_cache: str
) -> None:
    jobs, answers = greedy_jobs(name)
    sizes = {"max_num_batched_tokens": 8, "num_pages": 300, "pipeline_parallel_size": stages}
    for engine in make_engine(name, program_cache, tensor, "chunked", **sizes):
        assert run(engine, jobs) == answers
        assert run(engine, jobs[::-1]) == answers[::-1]
        assert engine.pool.num_cache_hits > 0, (
            "the second time, pages of prompts are in the prefix cache"
        )


@quick
@pytest.mark.usefixtures("narrow_samplers")
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 4},
        *map(slow, ({"max_num_batched_tokens": 64}, {"page_size": 32})),
    ],
)
def test_buckets_and_pages_do_not_matter(settings: dict[str, int], program_cache: str) -> None:
    jobs, answers = greedy_jobs("gpt2-12-heads")
    for engine in make_engine("gpt2-12-heads", program_cache, **settings):
        assert run(engine, jobs) == answers


@few
@quick
@pytest.mark.parametrize(("name", "workers"), [(GPT2, 2), slow(LLAMA, 3)])
def test_several_iterations_in_flight(name: str, workers: int, program_cache: str) -> None:
    jobs, answers = greedy_jobs(name)
    for engine in make_engine(name, program_cache, n_workers=workers, max_num_seqs=2):
        late = [Job(job.prompt, job.params, at_step=i) for i, job in enumerate(jobs)]
        assert run(engine, late) == answers


@few
@quick
@pytest.mark.parametrize(
    ("name", "devices", "stages"),
    [
        ("llama-12-heads-3-groups", 1, 2),
        slow("llama-12-heads-3-groups", 4, 2),
    ],
)
def test_pipelines(name: str, devices: int, stages: int, program_cache: str) -> None:
    """A batch in flight for each stage; or one more, to hide the time of the host."""
    jobs, answers = greedy_jobs(name)
    late = [Job(job.prompt, job.params, at_step=2 * i) for i, job in enumerate(jobs)]
    kinds = [name for name in SCHEDULERS if scheduler_kind(name).traits.has_workers]
    workers = dict.fromkeys(kinds, stages) | {"chunked": stages + 1}
    for scheduler, number in workers.items():
        settings = {
            "pipeline_parallel_size": stages,
            "n_workers": number if number > stages else None,
        }
        # all have the same programs
        settings |= {"max_num_seqs": stages * (stages + 1) // number, "num_pages": 30}
        for engine in make_engine(name, program_cache, devices, scheduler, **settings):
            assert engine.scheduler.n_workers == number
            assert run(engine, jobs) == answers, "together"
            assert run(engine, late) == answers, "joining while others run"


@few
@quick
@pytest.mark.slow
@pytest.mark.parametrize("layers", [6])
def test_four_stages_of_random_layers(layers: int, tmp_path: Path, program_cache: str) -> None:
    """With extras, seeds, constraints and preemption; 6 layers are spread as 1, 2, 2, 1."""
    (tmp_path / "config.json").write_text(
        (REFERENCE / "gpt2-12-heads" / "config.json")
        .read_text()
        .replace('"n_layer": 3', f'"n_layer": {layers}')
    )
    prompts = [job.prompt for job in greedy_jobs("gpt2-12-heads")[0]]
    jobs = [
        Job(prompt, params, at_step=i)
        for i, (prompt, params) in enumerate(zip(prompts, EXTRAS, strict=True))
    ]
    seen = []
    for stages in (1, 4):
        settings = {"load_format": "dummy", "pipeline_parallel_size": stages, "num_pages": 10}
        for engine in make_engine(str(tmp_path), program_cache, 1, "chunked", **settings):
            seen.append(run(engine, jobs))
            assert engine.executor.stats.compiles_while_serving == 0
    assert seen[0] == seen[1]


@few
@quick
def test_few_slots_and_pages_only_make_requests_wait(program_cache: str) -> None:
    """33 + 12 tokens need 45 slots, 6 pages of 8; few more are available."""
    jobs, answers = greedy_jobs("gpt2-12-heads")
    for engine in make_engine("gpt2-12-heads", program_cache, num_pages=10, n_slots=50):
        assert run(engine, jobs) == answers


@few
@quick
@pytest.mark.parametrize(
    ("num_pages", "overlap", "budget"),
    covering(chosen(product((10, 60), (False, True), (5, 64))), size=1),
)
def test_chunks_preemption_prefixes_and_overlap_do_not_matter(
    num_pages: int, overlap: bool, budget: int, program_cache: str
) -> None:
    """33 + 12 tokens need 6 pages of 8: with 10 pages, some of the four requests are preempted at some time."""
    jobs, answers = greedy_jobs("gpt2-12-heads")
    late = [Job(job.prompt, job.params, at_step=3 * i) for i, job in enumerate(jobs)]
    settings = {"num_pages": num_pages, "overlap": overlap, "max_num_batched_tokens": budget}
    for engine in make_engine("gpt2-12-heads", program_cache, scheduler="chunked", **settings):
        assert run(engine, jobs) == answers, "cold"
        assert run(engine, late) == answers, (
            "warm: full pages of the prompts are there, if there is room for them"
        )
        assert (engine.pool.num_preemptions > 0) == (num_pages == 10)
        assert num_pages == 10 or engine.pool.num_cache_hits > 0
        check_orderings(engine, late, answers)


AHEAD = (
    SamplingParams(max_tokens=28, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=27, seed=3, ignore_eos=True, stop_token_ids=range(2, 64, 11)),
    SamplingParams(max_tokens=25, temperature=0.7, top_k=9, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=5, top_p=0.8, ignore_eos=True),
)


@few
@quick
@pytest.mark.parametrize(("devices", "num_pages"), [(1, 10), slow(4, 60)])
def test_iterations_submitted_ahead_do_not_matter(
    devices: int, num_pages: int, program_cache: str
) -> None:
    """Greedy and drawn tokens, ends by length and by an id, new members and, with few pages, preemption."""
    greedy, answers = greedy_jobs("gpt2-12-heads")
    jobs = [Job(job.prompt, params) for job, params in zip(greedy, AHEAD, strict=True)]
    late = [Job(job.prompt, job.params, at_step=2 * i) for i, job in enumerate(jobs)]
    settings = {"num_pages": num_pages, "check_in_interval": 4, "strict_compile": True}
    for engine in make_engine("gpt2-12-heads", program_cache, devices, "chunked", **settings):
        scheduler = engine.scheduler
        assert isinstance(scheduler, ChunkedScheduler)
        assert scheduler.n_workers == 5
        scheduler.n_workers = engine.check_in_interval = 1
        expected = [run(engine, [job])[0] for job in jobs]
        assert expected[0][:12] == answers[0]
        assert len(expected[1]) < 27, "ended by an id"
        scheduler.n_workers, engine.check_in_interval = 5, 4
        assert [run(engine, [job])[0] for job in jobs] == expected, "alone"
        assert run(engine, jobs) == expected, "together"
        assert run(engine, late) == expected, "joining while others run"
        assert num_pages == 60 or engine.pool.num_preemptions > 0
        check_orderings(engine, late, expected)


EXTRAS = (
    SamplingParams(
        max_tokens=8, temperature=0, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.5
    ),
    SamplingParams(
        max_tokens=8, seed=3, ignore_eos=True, repetition_penalty=1.4, min_p=0.1, logprobs=2
    ),
    SamplingParams(
        max_tokens=8, seed=4, ignore_eos=True, logit_bias={7: 8.0, 9: -100.0}, prompt_logprobs=1
    ),
    SamplingParams(
        max_tokens=8, seed=5, ignore_eos=True, allowed_token_ids=range(40, 60), bad_token_ids=[[41]]
    ),
)


@few
@quick
@pytest.mark.parametrize(
    "engines",
    [list(product((1,), SCHEDULERS)), slow([(1, "orca"), (2, "request_level"), (4, "chunked")])],
    ids=["one device", "meshes"],
)
def test_sampling_and_extras_do_not_depend_on_mates_scheduler_or_mesh(
    engines: list[tuple[int, str]], program_cache: str
) -> None:
    prompts = [job.prompt for job in greedy_jobs("gpt2-12-heads")[0]]
    extras = [Job(*pair, at_step=2) for pair in zip(prompts, EXTRAS, strict=True)]
    jobs = extras + [
        Job(job.prompt, SamplingParams(max_tokens=8, temperature=t, top_k=k, top_p=p, seed=s, ignore_eos=True), at)
        for job, t, k, p, s, at in zip(
            greedy_jobs("gpt2-12-heads")[0], (1.0, 0.7, 1.5, 0.0), (0, 5, 0, 0), (1.0, 1.0, 0.8, 1.0),
            (1, 2, 2**62, -5), (0, 1, 2, 3), strict=True,
        )
    ]  # fmt: skip
    seen = []
    for devices, scheduler in engines:
        for engine in make_engine("gpt2-12-heads", program_cache, devices, scheduler):
            seen.append([run(engine, [Job(job.prompt, job.params)])[0] for job in jobs])
            seen.append(run(engine, jobs))
    assert all(tokens == seen[0] for tokens in seen)
    assert len({tuple(tokens) for tokens in seen[0]}) == 8
    assert set(seen[0][3]) <= set(range(40, 60)) - {41}
    assert len(set(seen[0][0])) > len(set(greedy_jobs("gpt2-12-heads")[1][0][:8])), (
        "penalties make it repeat less"
    )
