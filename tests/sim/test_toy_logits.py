"""The toy's distribution by hand: ten ids, favourite 3; so id 3 has logit 0, id 4 has -1/8, and id 2 has -9/8."""

import math

import pytest

from orca_jax.sim.toy_logits import best_of, first_allowed, toy_adjusted, toy_logprobs
from orca_jax.values.request import SamplingParams
from tests.sim.oracle import toy_generate, toy_score

PLAIN = SamplingParams(temperature=0.0)
NORM = math.log(sum(math.exp(-n / 8) for n in range(10)))


@pytest.mark.parametrize(("token", "distance"), [(3, 0), (4, 1), (9, 6), (0, 7), (2, 9)])
def test_log_probabilities(token: int, distance: int) -> None:
    logprob, rank, top_ids, top, others = toy_logprobs(3, token, 2, 10)
    assert others is None, "no ids were given"
    assert (rank, top_ids) == (distance + 1, (3, 4))
    assert logprob == pytest.approx(-distance / 8 - NORM)
    assert top == pytest.approx((-NORM, -1 / 8 - NORM))


def test_log_probabilities_sum_to_one_and_tops_end_with_the_vocabulary() -> None:
    whole = toy_logprobs(8, 0, 20, 10)
    assert whole.top_ids == (8, 9, 0, 1, 2, 3, 4, 5, 6, 7)
    assert sum(map(math.exp, whole.top_logprobs)) == pytest.approx(1)
    assert toy_logprobs(8, 0, 0, 10)[2:] == ((), (), None)


@pytest.mark.parametrize(
    ("fields", "prompt", "counts", "expected"),
    [
        ({"logit_bias": {5: 1.0}}, (), {}, {3: 0.0, 5: -2 / 8 + 1}),
        ({"repetition_penalty": 2.0}, (4,), {5: 3}, {3: 0.0, 4: -2 / 8, 5: -4 / 8}),
        ({"repetition_penalty": 2.0, "logit_bias": {4: 1.0}}, (4,), {}, {4: (-1 / 8 + 1) / 2}),
        ({"presence_penalty": 0.5}, (4,), {5: 3}, {4: -1 / 8, 5: -2 / 8 - 0.5}),
        ({"frequency_penalty": 0.5}, (4,), {5: 3}, {4: -1 / 8, 5: -2 / 8 - 1.5}),
        ({"frequency_penalty": -0.5, "presence_penalty": 0.25}, (), {5: 2}, {5: -2 / 8 - 0.25 + 1}),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0}, (), {5: 1}, {5: -4 / 8 - 1}),
    ],
)
def test_adjusted_logits(fields: dict, prompt: tuple, counts: dict, expected: dict) -> None:
    logits = toy_adjusted(3, SamplingParams(temperature=0.0, **fields), prompt, counts, 10)
    assert {token: logits[token] for token in expected} == pytest.approx(expected)
    untouched = set(range(10)) - set(expected) - {*prompt, *counts}
    assert all(logits[token] == -((token - 3) % 10) / 8 for token in untouched)


@pytest.mark.parametrize(
    ("allowed", "expected"), [(0b1111111111, 3), (0b0000100111, 5), (0b0000000110, 1), (1, 0)]
)
def test_masks(allowed: int, expected: int) -> None:
    assert first_allowed(3, allowed) == expected
    assert best_of(toy_adjusted(3, PLAIN, (), {}, 10), allowed) == expected


def test_equal_logits_are_the_lowest_ids() -> None:
    logits = toy_adjusted(
        3, SamplingParams(temperature=0.0, logit_bias={9: 6 / 8, 0: 7 / 8}), (), {}, 10
    )
    assert best_of(logits, (1 << 10) - 1) == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 4, 9]),  # 1*2 + 2*3 + 3*4 = 20; + 4*1 = 24; + 5*5 = 49
        # 20: 1 at 3/8; + 4*2 = 28: 1 at 1/8 beats 8; + 5*2 = 38: again
        ({"logit_bias": {1: 0.5}}, [1, 1, 1]),
        ({"allowed_token_ids": (5, 6)}, [5, 5, 5]),  # 20; + 4*6 = 44; + 5*6 = 74
        # 44: 5 at -5/8, 6 at -2/8; + 5*7 = 79
        ({"allowed_token_ids": (5, 6), "presence_penalty": 0.5}, [5, 6, 5]),
        ({"min_tokens": 2, "stop_token_ids": (0, 4)}, [1, 8, 3]),  # + 4*2 = 28; + 5*9 = 73
        ({"min_tokens": 1, "stop_token_ids": (0, 8)}, [1, 8]),
        ({"bad_token_ids": ((0, 4), (9,))}, [0, 5, 4]),  # 24 without 4; + 5*6 = 54
        ({"allowed_token_ids": (0,), "bad_token_ids": ((0, 0, 0),)}, [0, 0]),  # and then nothing
    ],
)
def test_the_oracle_by_hand(fields: dict, expected: list[int]) -> None:
    tokens = toy_generate(
        [1, 2, 3], SamplingParams(max_tokens=3, temperature=0, **fields), vocab_size=10
    )
    assert tokens == expected


def test_scores_of_known_ids() -> None:
    """After 1 the favourite is 2; after 1, 2 it is 8; after 1, 2, 3 it is 0."""
    assert [(score.rank, score.top_ids) for score in toy_score([1, 2, 3, 4], 1, vocab_size=10)] == [
        (1, (2,)),
        (6, (8,)),
        (5, (0,)),
    ]
