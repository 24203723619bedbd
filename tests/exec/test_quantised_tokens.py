"""Tokens of models with quantised weights and a quantised KV cache do not depend on scheduler, chunks or mesh."""

from typing import Any

import pytest

from tests.test_same_tokens import GPT2, LLAMA, SCHEDULERS, check_together, greedy_jobs, make_engine, run

pytestmark = [pytest.mark.slow, *(pytest.mark.usefixtures(name) for name in ("compiled_once", "quick_compiles"))]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (GPT2, {"quantization": "int8"}),
        (GPT2, {"quantization": "int4", "kv_cache_dtype": "int8"}),
        (LLAMA, {"quantization": "fp8"}),
        (LLAMA, {"kv_cache_dtype": "int8"}),
        (LLAMA, {"kv_cache_dtype": "fp8"}),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(name: str, settings: dict[str, Any], program_cache: str) -> None:
    jobs, of_plain_weights = greedy_jobs(name)
    answers = None
    for devices in (1, 2):
        for scheduler in SCHEDULERS:
            for engine in make_engine(name, program_cache, devices, scheduler, **settings):
                alone = [run(engine, [job])[0] for job in jobs]
                answers = answers or alone
                assert alone == answers, (devices, scheduler)
                check_together(engine, jobs, answers)
    assert answers is not None and all(
        len(own) == len(plain) for own, plain in zip(answers, of_plain_weights, strict=True)
    )


@pytest.mark.parametrize("implementation", ["reference", "gather"])
def test_other_implementations_read_the_same_pages(implementation: str, program_cache: str) -> None:
    jobs, _ = greedy_jobs(LLAMA)
    settings: dict[str, Any] = {"kv_cache_dtype": "int8"}
    (wanted,) = (run(engine, jobs) for engine in make_engine(LLAMA, program_cache, **settings))
    settings["attention_implementation"] = implementation
    (found,) = (run(engine, jobs) for engine in make_engine(LLAMA, program_cache, **settings))
    assert found == wanted
