"""Buckets and the cutting of an iteration into launches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.exec.buckets import (
    bucket_for,
    default_buckets,
    launches,
    measured_sizes,
    sampler_widths,
)
from orca_jax.values.step import Member


def member(row: int, num_tokens: int) -> Member:
    return Member(str(row), row, 0, list(range(num_tokens)), is_sampling=True)


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 512, 600, 4096])
def test_default_buckets_ascend_to_the_largest(largest: int) -> None:
    buckets = default_buckets(largest)
    assert buckets[-1] == largest
    assert list(buckets) == sorted(set(buckets))
    assert len(buckets) <= 24, "each bucket is a program to compile"


@given(st.integers(16, 512))
def test_at_most_a_third_of_a_bucket_is_padding(num_tokens: int) -> None:
    bucket = bucket_for(default_buckets(512), num_tokens)
    assert 0 <= bucket - num_tokens <= bucket / 3


def test_few_programs_if_padding_is_skipped() -> None:
    assert default_buckets(512, skips_padding=True) == (1, 8, 32, 128, 512)
    assert default_buckets(600, skips_padding=True) == (1, 8, 32, 128, 512, 600)
    assert default_buckets(20, skips_padding=True) == (1, 8, 20)
    assert (sampler_widths(100), sampler_widths(100, can_skip=True)) == (
        (8, 16, 32, 64, 100),
        (1, 100),
    )


def test_sizes_between_buckets_are_measured_if_padding_is_skipped() -> None:
    assert measured_sizes((1, 8, 20), skips_padding=False) == (1, 8, 20)
    assert measured_sizes((1, 8, 20), skips_padding=True) == (1, 2, 4, 8, 16, 20)
    assert measured_sizes((6, 40), skips_padding=True) == (6, 8, 16, 32, 40)


def test_bucket_for_is_the_smallest_that_is_large_enough() -> None:
    assert [bucket_for((4, 8, 16), n) for n in (1, 4, 5, 16)] == [4, 4, 8, 16]


def test_one_launch_when_all_fits_with_increments_first() -> None:
    plan = [member(0, 3), member(1, 1), member(2, 2), member(3, 1)]
    assert list(launches(plan, 8, 8)) == [[(1, 0, 1), (3, 0, 1), (0, 0, 3), (2, 0, 2)]]


def test_a_long_prompt_continues_in_the_next_launch() -> None:
    plan = [member(0, 10), member(1, 1)]
    assert list(launches(plan, 4, 4)) == [[(1, 0, 1), (0, 0, 3)], [(0, 3, 4)], [(0, 7, 3)]]


def test_a_single_token_that_a_cut_left_comes_first() -> None:
    plan = [member(0, 5), member(1, 3)]
    assert list(launches(plan, 4, 4)) == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 32))
def test_launches_cover_every_token_once_and_in_order(sizes: list[int], largest: int) -> None:
    plan = [member(row, size) for row, size in enumerate(sizes)]
    seen = dict.fromkeys(range(len(sizes)), 0)
    for launch in launches(plan, largest, largest):
        assert sum(segment.size for segment in launch) <= largest
        assert len({segment.member for segment in launch}) == len(launch)
        singles = [segment.size == 1 for segment in launch]
        assert singles == sorted(singles, reverse=True)
        for index, offset, size in launch:
            assert offset == seen[index]
            seen[index] += size
    assert list(seen.values()) == sizes
