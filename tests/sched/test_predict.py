"""Predictions of lengths, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.request import SamplingParams
from orca_jax.sched.pool import ClientBound, Predictor
from orca_jax.sched.predict import Oracle, RunningQuantiles, Scored
from orca_jax.sched.request import Request
from tests.sched.lab import Lab, Shape


def request(num_prompt: int = 5, *, max_tokens: int = 100, generated: int = 0, name: str = "r") -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    one = Request(name, [1] * num_prompt, params, arrival=0.0, arrival_index=0, seed=0, stop_ids=frozenset())
    one.generated_ids = [1] * generated
    return one


# Output lengths of ended requests with prompts of five tokens -> the prediction for a newcomer; window 4, two suffice.
BY_HAND = {
    "nothing is known": (0.5, [], 100),
    "one is not enough": (0.5, [7], 100),
    "of two the lower": (0.5, [9, 7], 7),
    "the middle one": (0.5, [1, 50, 7], 7),
    "of four the second": (0.5, [4, 3, 2, 1], 2),
    "the oldest is forgotten": (0.5, [1, 1, 8, 9, 9, 9], 9),
    "only one of equal lengths is forgotten": (0.5, [1, 1, 8, 9, 9], 8),
    "another quantile": (0.75, [4, 3, 2, 1], 3),
    "the longest": (1.0, [4, 3, 2, 1], 4),
    "never above the bound": (0.5, [300, 300, 300], 100),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_quantiles_by_hand(case: str) -> None:
    quantile, lengths, expected = BY_HAND[case]
    predictor = RunningQuantiles(quantile, window=4, enough=2)
    for length in lengths:
        predictor.observe(request(generated=length))
    assert predictor.predict(request()) == expected


def test_classes_are_powers_of_two() -> None:
    """4 to 7 tokens are one class; 3 and 8 belong to its neighbours without observations."""
    predictor = RunningQuantiles(window=4, enough=1)
    predictor.observe(request(5, generated=11))
    assert [predictor.predict(request(length)) for length in (3, 4, 7, 8)] == [100, 11, 11, 100]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 500)), max_size=200), st.integers(1, 50))
def test_memory_is_bounded_and_guesses_too(ends: list[tuple[int, int]], max_tokens: int) -> None:
    predictor = RunningQuantiles(window=8, enough=2)
    for num_prompt, length in ends:
        one = request(1, generated=length)
        one.prompt_ids = range(num_prompt)  # type: ignore[assignment]
        predictor.observe(one)
    assert len(predictor._seen) <= 21
    for came, ordered in predictor._seen.values():
        assert sorted(came) == ordered and len(came) <= 8
    assert 1 <= predictor.predict(request(max_tokens=max_tokens)) <= max_tokens


@pytest.mark.parametrize(("said", "expected"), [(0.2, 1.0), (-3.0, 1.0), (17.5, 17.5), (1000.0, 100.0)])
def test_predictions_are_kept_within_bounds(said: float, expected: float) -> None:
    assert Scored(lambda prompt_ids: said * len(prompt_ids)).predict(request(1)) == expected
    assert Oracle({"r": said}).predict(request()) == expected


def test_a_score_reads_the_prompt() -> None:
    assert Scored(lambda prompt_ids: 3.0 * sum(prompt_ids)).predict(request(7)) == 21


@pytest.mark.parametrize("predictor", [ClientBound(), Oracle({"r": 3}), Scored(len)])
def test_some_learn_nothing(predictor: Predictor) -> None:
    before = predictor.predict(request())
    predictor.observe(request(generated=50))
    assert predictor.predict(request()) == before


def test_the_pool_predicts_once_and_reports_ends() -> None:
    """A is cut off after four tokens and B after two. C was aborted: the predictor does not observe it."""
    lab = Lab(max_bs=2, shape=Shape(reuses_prefixes=False))
    lab.pool.predictor = RunningQuantiles(enough=2)
    for name, max_tokens in (("A", 4), ("B", 2), ("C", 9)):
        lab.add(name, 5, max_tokens)
    lab.engine.abort("C")
    lab.run()
    lab.add("D", 5, 9)
    (waiting,) = lab.pool
    assert waiting.predicted_output == 2
