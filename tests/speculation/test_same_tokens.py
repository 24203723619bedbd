"""A request gets the same tokens with and without proposals, under every scheduler."""

import pytest

from orca_jax.sched.drafts.gain import IterationTimes
from orca_jax.sched.drafts.scheduler import TRY_FOR, SpeculativeScheduler
from orca_jax.values.request import SamplingParams
from tests.covering import slow
from tests.test_same_tokens import (
    GPT2,
    LLAMA,
    REFERENCE,
    Job,
    few,
    greedy_jobs,
    make_engine,
    quick,
    run,
)

pytestmark = pytest.mark.usefixtures("compiled_when_used")

SPECULATIVE = (
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(
        max_tokens=31, seed=3, temperature=0.3, ignore_eos=True, stop_token_ids=range(2, 64, 11)
    ),
    SamplingParams(max_tokens=35, temperature=0.2, top_k=9, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=26, temperature=0.1, seed=5, top_p=0.8, ignore_eos=True),
)
WIDE: dict[str, object] = {"num_speculative_tokens": 5, "disable_by_batch_size": None}
WITH_EXTRAS = SamplingParams(
    max_tokens=9, temperature=0, ignore_eos=True, repetition_penalty=1.3, logprobs=2
)


@few
@quick
@pytest.mark.parametrize(
    ("scheduler", "devices", "settings", "proposals"),
    [
        ("chunked", 1, {}, {}),
        slow("chunked", 1, {"num_pages": 12}, WIDE),
        slow("chunked", 1, {"pipeline_parallel_size": 2, "n_workers": 3}, WIDE),
        slow("orca", 1, {"n_workers": 2, "max_num_seqs": 2}, WIDE),
        slow("request_level", 2, {}, WIDE),
    ],
)
def test_proposals_do_not_matter(
    scheduler: str,
    devices: int,
    settings: dict[str, object],
    proposals: dict[str, object],
    program_cache: str,
) -> None:
    """Greedy and sampled; ends by length and by an id; more requests than rows; beside a request with extras."""
    greedy, answers = greedy_jobs("gpt2-12-heads")
    jobs = [Job(job.prompt, params) for job, params in zip(greedy, SPECULATIVE, strict=True)]
    jobs = [*jobs, Job(greedy[0].prompt, WITH_EXTRAS, at_step=3)]
    seen = []
    # Not more draws than the smallest sampler has places, so that no program is compiled for this test alone.
    ngram = {
        "num_speculative_tokens": 2,
        "disable_by_batch_size": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    for speculative in (None, {**ngram, **proposals}):
        more = {"speculative_config": speculative, "strict_compile": True, **settings}
        for engine in make_engine("gpt2-12-heads", program_cache, devices, scheduler, **more):
            if isinstance(engine.scheduler, SpeculativeScheduler):
                engine.scheduler.times = IterationTimes({})  # as if proposals cost nothing
            seen.append([run(engine, [Job(job.prompt, job.params)])[0] for job in jobs])
            seen.append(run(engine, jobs))
            drafts = engine.pool.drafts
    assert all(tokens == seen[0] for tokens in seen)
    assert seen[0][0][:12] == answers[0]
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@few
@quick
@pytest.mark.parametrize(
    ("target", "draft", "scheduler", "devices", "settings"),
    [
        slow(GPT2, GPT2, "chunked", 1, {}),
        slow(GPT2, LLAMA, "orca", 2, {}),
        # With windows; few pages lead to preemption, and the draft model keeps all tokens.
        slow("mistral-window", "gemma2", "chunked", 1, {"num_pages": 14}),
    ],
)
def test_a_draft_model_does_not_matter(
    target: str,
    draft: str,
    scheduler: str,
    devices: int,
    settings: dict[str, object],
    program_cache: str,
) -> None:
    """The model itself, of which all proposals are accepted, and another one."""
    greedy, answers = greedy_jobs(target)
    jobs = [
        Job(job.prompt, params, at_step=i)
        for i, (job, params) in enumerate(zip(greedy, SPECULATIVE, strict=True))
    ]
    proposals = {
        "method": "draft_model",
        "model": str(REFERENCE / draft),
        "num_speculative_tokens": 3,
    }
    seen = []
    for speculative in (None, proposals):
        more: dict[str, object] = {
            "speculative_config": speculative,
            "strict_compile": True,
            **settings,
        }
        for engine in make_engine(target, program_cache, devices, scheduler, **more):
            if isinstance(engine.scheduler, SpeculativeScheduler):
                engine.scheduler.times = IterationTimes({})
            seen += [run(engine, jobs), run(engine, jobs[::-1])[::-1]]
            drafts = engine.pool.drafts
    assert all(tokens == seen[0] for tokens in seen)
    assert seen[0][0][:12] == answers[0]
    assert drafts.num_drafts >= 2 * TRY_FOR  # a try in each run, also of one request at a time
    assert (drafts.num_accepted_tokens == drafts.num_draft_tokens) == (draft == target)
