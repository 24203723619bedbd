"""Predictions of lengths, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.sched.pool import ClientBound
from orca_jax.sched.predict import EnginePredictor, Oracle, RunningQuantiles, Scored
from orca_jax.sched.request import Request
from orca_jax.values.request import SamplingParams
from tests.sched.lab import Lab, Shape


def request(
    num_prompt: int = 5, *, max_tokens: int = 100, generated: int = 0, name: str = "r"
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    one = Request(
        name, [1] * num_prompt, params, arrival=0.0, arrival_index=0, seed=0, stop_ids=frozenset()
    )
    one.generated_ids = [1] * generated
    return one


def predicted(predictor: EnginePredictor, one: Request) -> float:
    return predictor.predict(one, one.prompt_ids)


def observe(predictor: EnginePredictor, one: Request) -> None:
    predictor.observe(one, len(one.generated_ids))


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
        observe(predictor, request(generated=length))
    assert predicted(predictor, request()) == expected


def test_classes_are_powers_of_two() -> None:
    """4 to 7 tokens are one class; 3 and 8 belong to its neighbours without observations."""
    predictor = RunningQuantiles(window=4, enough=1)
    observe(predictor, request(5, generated=11))
    assert [predicted(predictor, request(length)) for length in (3, 4, 7, 8)] == [100, 11, 11, 100]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 500)), max_size=200),
    st.integers(1, 50),
)
def test_memory_is_bounded_and_guesses_too(ends: list[tuple[int, int]], max_tokens: int) -> None:
    predictor = RunningQuantiles(window=8, enough=2)
    for num_prompt, length in ends:
        one = request(1, generated=length)
        one.prompt_ids = range(num_prompt)  # type: ignore[assignment]
        observe(predictor, one)
    assert len(predictor._seen) <= 21
    for came, ordered in predictor._seen.values():
        assert sorted(came) == ordered and len(came) <= 8
    assert 1 <= predicted(predictor, request(max_tokens=max_tokens)) <= max_tokens


@pytest.mark.parametrize(
    ("said", "expected"), [(0.2, 1.0), (-3.0, 1.0), (17.5, 17.5), (1000.0, 100.0)]
)
def test_predictions_are_kept_within_bounds(said: float, expected: float) -> None:
    assert predicted(Scored(lambda prompt_ids: said * len(prompt_ids)), request(1)) == expected
    assert predicted(Oracle({"r": said}), request()) == expected


def test_a_score_reads_the_prompt() -> None:
    assert predicted(Scored(lambda prompt_ids: 3.0 * sum(prompt_ids)), request(7)) == 21


@pytest.mark.parametrize("predictor", [ClientBound(), Oracle({"r": 3}), Scored(len)])
def test_some_learn_nothing(predictor: EnginePredictor) -> None:
    before = predicted(predictor, request())
    observe(predictor, request(generated=50))
    assert predicted(predictor, request()) == before


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
