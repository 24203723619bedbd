"""Log probabilities against numpy's log-softmax, on one device and on shards."""

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from orca_jax.exec.sampling.logprobs import LogprobReader
from orca_jax.exec.sampling.programs import Drawn
from orca_jax.values.request import MAX_LOGPROBS
from tests.exec.sampling.test_adjust import COLUMNS, VOCAB, Row, draw, parameters, some_logits

WIDTH = 6
pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits[:, :VOCAB].astype(np.float64)
    shifted = exact - exact.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def reader(drawn: Drawn) -> LogprobReader:
    assert drawn.scores is not None
    return LogprobReader(drawn.scores, VOCAB, has_listed=True)


@pytest.mark.parametrize(
    "devices", [1, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8))]
)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_changes_of_the_draw_do_not_change_log_probabilities(
    devices: int, temperature: float
) -> None:
    logits = some_logits(6, WIDTH) * 3
    logits[:, VOCAB:] = 90.0  # padding counts nowhere
    strange = Row([1], [2, 2], repetition=2.0, presence=1.0, bias={5: 60.0}, wants_logprobs=True)
    rows = [strange, Row(allowed=frozenset({77}), wants_logprobs=True)] * (WIDTH // 2)
    drawn = draw(logits, rows, parameters([temperature] * WIDTH), devices)
    expected = log_softmax(logits)
    for place in range(WIDTH):
        entry = reader(drawn).read(place, MAX_LOGPROBS)
        token = int(drawn.tokens[place])
        assert entry.logprob == pytest.approx(expected[place, token], abs=2e-5)
        assert entry.rank == 1 + int((expected[place] > expected[place, token]).sum())
        best = np.argsort(-expected[place], kind="stable")[:MAX_LOGPROBS]
        assert entry.top_ids == tuple(best)
        np.testing.assert_allclose(entry.top_logprobs, expected[place][best], atol=2e-5)
    assert set(drawn.tokens[1::2].tolist()) == {77}


@pytest.mark.parametrize("devices", [1, 4])
def test_a_target_is_scored_in_place_of_the_token_that_is_drawn(devices: int) -> None:
    logits = some_logits(7, WIDTH)
    targets = [0, 64, 127, 128, 200, 999]
    rows = [Row(wants_logprobs=True, target=target) for target in targets]
    values = reader(draw(logits, rows, parameters([0.0] * WIDTH), devices))
    expected = log_softmax(logits)
    assert [values.read(place, 0).logprob for place in range(WIDTH)] == pytest.approx(
        [expected[place, target] for place, target in enumerate(targets)], abs=2e-5
    )
    assert values.read(0, 0).top_ids == ()
    assert len(values.read(0, 3).top_ids) == 3


def test_ties_share_a_rank_and_the_lower_id_is_reported_first() -> None:
    logits = np.zeros((1, COLUMNS), np.float32)
    logits[0, [9, 200]] = 1.0
    for devices in (1, 4):
        rows = [Row(wants_logprobs=True, target=200)]
        entry = reader(draw(logits, rows, parameters([0.0]), devices)).read(0, 4)
        assert entry.rank == 1
        assert entry.top_ids == (9, 200, 0, 1)


def test_no_more_tokens_are_reported_than_exist() -> None:
    values = reader(draw(some_logits(8, 1), [Row(wants_logprobs=True)], parameters([0.0])))
    assert len(values.read(0, 5).top_ids) == 5
    drawn = draw(some_logits(8, 1), [Row(wants_logprobs=True)], parameters([0.0]))
    assert drawn.scores is not None
    few = LogprobReader(drawn.scores, vocab_size=3)
    assert len(few.read(0, 5).top_ids) == 3


def test_nothing_is_computed_without_requests_for_log_probabilities() -> None:
    drawn = draw(some_logits(9, 2), [Row(), Row()], parameters([0.0, 1.0]))
    assert not any(np.asarray(part).any() for part in jax.tree.leaves(drawn.scores))


@pytest.mark.parametrize("devices", [1, 4])
def test_listed_ids_are_scored_with_the_mass_of_all_others(devices: int) -> None:
    logits = some_logits(10, WIDTH) * 3
    logits[:, VOCAB:] = 90.0
    lists = [[3], [0, 999, 127, 128], list(range(0, 900, 3)), [], [5, 6], [7]]
    rows = [Row(scored=ids, wants_logprobs=True) for ids in lists]
    rows[4] = Row(scored=lists[4], bias={5: 60.0, 9: -60.0}, wants_logprobs=True)
    rows[5] = Row(scored=lists[5], target=7, wants_logprobs=True)
    values = reader(draw(logits, rows, parameters([0.0] * WIDTH), devices))
    expected = log_softmax(logits)
    for place, ids in enumerate(lists):
        entry = values.read_listed(place, ids)
        assert entry.top_ids == tuple(ids)
        np.testing.assert_allclose(entry.top_logprobs, expected[place][ids], atol=2e-5)
        rest = np.delete(np.exp(expected[place]), ids).sum()
        assert entry.others == pytest.approx(rest, abs=1e-6)
    assert values.read(5, 0).logprob == values.read_listed(5, [7]).top_logprobs[0]
