"""Ids forbidden by parameters: by hand, and against a search of all generated tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.sched.admission import (
    AllOf,
    AllowedTokens,
    MinTokens,
    after,
    all_tokens,
    build_constraint,
)
from orca_jax.values.request import Constraint, SamplingParams, token_set

VOCAB = 6


def ids_of(tokens: int) -> list[int]:
    return [token for token in range(tokens.bit_length()) if tokens >> token & 1]


@pytest.mark.parametrize(
    ("ids", "tokens"), [([], 0), ([0], 1), ([3, 1, 3], 0b1010), ([200], 1 << 200)]
)
def test_token_set(ids: list[int], tokens: int) -> None:
    assert token_set(ids) == tokens
    assert ids_of(tokens) == sorted(set(ids))


@pytest.mark.parametrize(
    ("fields", "generated", "allowed"),
    [
        ({"allowed_token_ids": (1, 4)}, [], [1, 4]),
        ({"allowed_token_ids": (1, 4)}, [1, 1], [1, 4]),
        ({"bad_token_ids": ((2,), (0,))}, [], [1, 3, 4, 5]),
        ({"bad_token_ids": ((1, 2, 3),)}, [1, 2], [0, 1, 2, 4, 5]),
        ({"bad_token_ids": ((1, 2, 3),)}, [1, 2, 2], [0, 1, 2, 3, 4, 5]),
        ({"bad_token_ids": ((1, 1, 1),)}, [1, 1], [0, 2, 3, 4, 5]),
        ({"bad_token_ids": ((1, 2), (2, 2, 0))}, [2, 2], [1, 2, 3, 4, 5]),
        ({"bad_token_ids": ((1, 2), (2, 1, 0))}, [2, 1], [1, 3, 4, 5]),
        ({"min_tokens": 2}, [], [0, 1, 2, 3]),
        ({"min_tokens": 2}, [1], [0, 1, 2, 3]),
        ({"min_tokens": 2, "bad_token_ids": ((1,),)}, [0], [0, 2, 3]),
        ({"min_tokens": 2, "bad_token_ids": ((1,),)}, [0, 0], [0, 2, 3, 4, 5]),
        ({"min_tokens": 1, "allowed_token_ids": (4, 5)}, [], []),
    ],
)
def test_by_hand(fields: dict, generated: list[int], allowed: list[int]) -> None:
    """Ids 4 and 5 are end tokens."""
    constraint = build_constraint(SamplingParams(**fields), {4, 5}, VOCAB)
    assert constraint is not None
    for token in generated:
        constraint.accept(token)
    assert ids_of(constraint.allowed()) == allowed


@pytest.mark.parametrize(
    ("fields", "end_ids"),
    [({}, {4}), ({"min_tokens": 3}, set()), ({"logit_bias": {1: 5.0}, "logprobs": 3}, {4})],
)
def test_nothing_forbidden_is_no_constraint(fields: dict, end_ids: set[int]) -> None:
    assert build_constraint(SamplingParams(**fields), end_ids, VOCAB) is None


def test_an_outer_constraint_alone_is_left_as_it_is() -> None:
    outer = AllowedTokens(0b11)
    assert build_constraint(SamplingParams(), {4}, VOCAB, outer) is outer
    both = build_constraint(SamplingParams(bad_token_ids=((0,),)), {4}, VOCAB, outer)
    assert both is not None and both.allowed() == 0b10


def test_min_tokens_alone_cost_nothing_afterwards() -> None:
    constraint = build_constraint(SamplingParams(min_tokens=2), {4}, VOCAB)
    assert constraint is not None
    assert after(constraint, 1) is constraint
    assert after(constraint, 1) is None


def test_a_part_that_is_over_is_forgotten() -> None:
    both = AllOf([MinTokens(1, 0b01), MinTokens(2, 0b11)])
    assert both.allowed() == 0b01
    assert after(both, 0) is both
    assert both.allowed() == 0b11
    assert after(both, 0) is None


ids = st.integers(0, VOCAB - 1)


@given(
    bad=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
    listed=st.none() | st.lists(ids, min_size=1),
    min_tokens=st.integers(0, 5),
    ends=st.sets(ids),
    generated=st.lists(ids, max_size=10),
)
def test_against_the_whole_history(
    bad, listed, min_tokens: int, ends: set[int], generated: list[int]
) -> None:
    params = SamplingParams(bad_token_ids=bad, allowed_token_ids=listed, min_tokens=min_tokens)
    constraint: Constraint | None = build_constraint(params, ends, VOCAB)
    for done in range(len(generated) + 1):
        history = generated[:done]
        expected = [
            token
            for token in range(VOCAB)
            if (listed is None or token in listed)
            and not (done < min_tokens and token in ends)
            and not any([*history, token][-len(sequence) :] == sequence for sequence in bad)
        ]
        tokens = all_tokens(VOCAB) if constraint is None else constraint.allowed()
        assert ids_of(tokens) == expected
        if done < len(generated) and constraint is not None:
            constraint = after(constraint, generated[done])
