"""The bounds in docs/measured/roofline.md agree with how the kernels cut their work, and with simple estimates."""

import re

import pytest

from tests.aot.roofline import (
    H200,
    LLAMA,
    PAGE,
    QWEN,
    chunks,
    increments,
    state_chunks,
    state_increments,
)


def number(cell: str) -> float:
    found = re.search(r"[\d.]+", cell)
    assert found is not None
    return float(found[0])


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    assert not PAGE.is_old(), f"run: {PAGE.command}"


def test_many_long_contexts_are_bound_by_memory() -> None:
    *_, bound, microseconds, share = increments(H200, LLAMA, 64, 4096)
    assert bound == "memory"
    # 64 x 4096 tokens of 8 heads, with keys and values of 128 numbers of 2 bytes, at 4.8 TB/s.
    assert number(microseconds) >= 64 * 4096 * 4096 / 4.8e6
    assert 95 < number(share) <= 100


def test_a_long_prompt_is_bound_by_products() -> None:
    *_, bound, microseconds, share = chunks(H200, LLAMA, 16384)
    assert bound == "tensor cores"
    assert number(microseconds) >= 4 * 128 * 32 * 16384**2 / 2 / 990e6
    assert 90 < number(share) <= 100


def test_states_of_single_tokens_are_read_and_written_once() -> None:
    *_, bound, microseconds, share = state_increments(H200, QWEN, 64)
    assert bound == "memory"
    states = 64 * 32 * 128 * 128 * 4
    assert 2 * states / 4.8e6 <= number(microseconds) < 2.1 * states / 4.8e6
    assert number(share) >= 95


def test_states_of_a_prompt_take_few_milliseconds() -> None:
    """The products of a layer in bfloat16 bound it from below; without any overlap it is far from a model's 60 ms."""
    *_, microseconds, share = state_chunks(H200, QWEN, 2048)
    assert number(microseconds) > 3 * 2 * 2048 * 32 * 128 * (3 * 128 + 2 * 64) / 990e6
    assert float(share.split(", ")[1].split()[0]) < 8
