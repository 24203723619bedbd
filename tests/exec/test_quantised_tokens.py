"""Tokens of models with quantised weights and a quantised KV cache do not depend on scheduler, chunks or mesh."""

from itertools import product
from typing import Any

import pytest

from orca_jax.values.config import SCHEDULERS
from tests.covering import chosen
from tests.test_same_tokens import (
    GPT2,
    LLAMA,
    check_together,
    few,
    greedy_jobs,
    make_engine,
    quick,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_when_used"), few, quick]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": (GPT2, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "int4": (LLAMA, {"quantization": "int4", "kv_cache_dtype": "fp8"}),
    "fp8": (LLAMA, {"quantization": "fp8"}),
    "int8 cache": (LLAMA, {"kv_cache_dtype": "int8"}),
}
_answers: dict[str, list[list[int]]] = {}  # of the first engine, one request after the other


def check(case: str, cache: str, devices: int, scheduler: Any, **settings: object) -> None:
    name, of_case = CASES[case]
    jobs, _ = greedy_jobs(name)
    for engine in make_engine(name, cache, devices, scheduler, **of_case, **settings):
        alone = [run(engine, [job])[0] for job in jobs]
        assert alone == _answers.setdefault(case, alone)
        check_together(engine, jobs, alone)


@pytest.mark.parametrize(
    ("case", "devices", "scheduler"),
    chosen(product(CASES, (1, 2), SCHEDULERS), lambda case: (case[0], case[1:]), size=1),
)
def test_tokens_do_not_depend_on_the_schedule(
    case: str, devices: int, scheduler: Any, program_cache: str
) -> None:
    check(case, program_cache, devices, scheduler)


def test_the_reference_reads_the_same_pages(program_cache: str) -> None:
    """Servers on CPUs have one other implementation; tests/kernels/ragged_attention reads such pages with all."""
    check("int8 cache", program_cache, 1, "orca", attention_implementation="reference")
