"""A burst on a GPT-2 with random weights: the tokens of transformers under every policy of the shelf, in float32."""

from typing import Any

import pytest

from orca_jax.policy.scheduler import PolicyScheduler
from tests.project.source import ROOT
from tests.test_same_tokens import GPT2, Job, greedy_jobs, make_engine, run

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ewsjf": ("Ewsjf", {"step": 4}),
    "mc_sf": ("McSf", {"page_size": 8}),
    "orca": ("Orca", {}),
    "plas": ("Plas", {"quanta": [8, 16]}),
    "pools": ("Pools", {"places": 6, "bounds": [4, 8]}),
    "prefill_first": ("PrefillFirst", {}),
    "prefix_match": ("PrefixMatch", {"k": 2}),
    "sagesched": ("SageSched", {"quantum": 4}),
    "sarathi": ("Sarathi", {}),
    "skip_join_mlfq": ("SkipJoinMlfq", {"quantum": 4}),
    "srpt": ("Srpt", {"noise": 1.0}),
    "vtc": ("VirtualTokenCounter", {"w_q": 3}),
}


def test_every_policy_is_run() -> None:
    assert set(CLASSES) == {path.stem for path in (ROOT / "lab" / "policies").glob("[a-z]*.py")}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
@pytest.mark.parametrize("name", CLASSES)
def test_equal_tokens_of_a_burst(name: str, program_cache: str) -> None:
    """Eight requests in a few steps, two in an iteration and four with rows; all fit into 1,024 tokens."""
    kind, options = CLASSES[name]
    jobs, answers = greedy_jobs(GPT2)
    burst = [
        Job(job.prompt, job.params, at_step=number // 2) for number, job in enumerate(jobs * 2)
    ]
    assert sum([len(job.prompt) + job.params.max_tokens for job in burst]) <= 1024
    scheduler: Any = f"{ROOT}/lab/policies/{name}.py:{kind}"
    settings = {
        "scheduler_options": options,
        "max_num_seqs": 2,
        "max_num_rows": 4,
        "max_num_batched_tokens": 64,
    }
    for engine in make_engine(GPT2, program_cache, 1, scheduler, **settings, num_pages=24):
        assert isinstance(engine.scheduler, PolicyScheduler)
        assert run(engine, burst) == answers * 2
        assert engine.stats.overruled_decisions == 0
