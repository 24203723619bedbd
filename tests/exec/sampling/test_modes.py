"""Log probabilities and logits by `logprobs_mode`, against the sorting oracle and the formulas of the changes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from orca_jax.exec.sampling.draw import SamplingParameters
from orca_jax.exec.sampling.logprobs import LogprobReader
from orca_jax.exec.sampling.programs import Drawn, sample_full
from orca_jax.model.load import tensor_mesh
from orca_jax.values.config import LogprobsMode
from orca_jax.values.request import MAX_LOGPROBS
from tests.covering import slow
from tests.exec.sampling.test_adjust import (
    VOCAB,
    Row,
    context_of,
    extras_of,
    masks_of,
    oracle,
    some_logits,
)
from tests.exec.sampling.test_draw import CASES, distribution

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
CHANGED = Row(
    [1, 2, 3],
    [3, 4, 4],
    presence=0.5,
    repetition=1.3,
    bias={9: 4.0},
    allowed=frozenset(range(700)),
    wants_logprobs=True,
)
GREEDY = (0.0, 3, 0.5, 0.2)  # filters that have no effect
SETTINGS = [*CASES, GREEDY]


def parameters() -> SamplingParameters:
    count = len(SETTINGS)
    temperature, top_k, top_p, min_p = zip(*SETTINGS, strict=True)
    zeros = jnp.zeros(count, jnp.int32)
    return SamplingParameters(
        jnp.array(temperature, jnp.float32),
        jnp.array(top_k, jnp.int32),
        jnp.array(top_p, jnp.float32),
        jnp.array(min_p, jnp.float32),
        zeros,
        jnp.arange(count, dtype=jnp.int32),
        zeros,
    )


@cache
def sampling(mode: LogprobsMode, devices: int):
    return jax.jit(
        partial(
            sample_full,
            vocab_size=VOCAB,
            mesh=tensor_mesh(jax.devices()[:devices]),
            logprobs_mode=mode,
        )
    )


def drawn_by(mode: LogprobsMode, rows: list[Row], devices: int) -> Drawn:
    logits = jnp.asarray(some_logits(3, len(rows)) * 1.5)
    values = (logits, parameters(), extras_of(rows), context_of(rows), masks_of(rows))
    return jax.tree.map(np.asarray, sampling(mode, devices)(*values))


def expected(mode: LogprobsMode, row: Row) -> list[NDArray[np.float64]]:
    """The values of all tokens, by setting."""
    raw = some_logits(3, len(SETTINGS))[:, :VOCAB] * 1.5
    found = []
    for logits, (temperature, top_k, top_p, min_p) in zip(raw, SETTINGS, strict=True):
        values = logits.astype(np.float64)
        if mode.startswith("processed"):
            values = oracle(logits, row)
            if temperature:
                mass = distribution(values, temperature, top_k, top_p, min_p)
                values = np.where(mass > 0, values / temperature, -np.inf)
        if mode.endswith("logprobs"):
            values = values - np.logaddexp.reduce(values)
        found.append(values)
    return found


def matches(found: float, wanted: float) -> bool:
    return found == wanted or found == pytest.approx(wanted, abs=3e-5)


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        ("raw_logits", 1),
        slow("processed_logprobs", 1),
        ("processed_logprobs", 4),
        ("processed_logits", 2),
    ],
)
def test_drawn_and_best_tokens_have_the_values_of_the_mode(
    mode: LogprobsMode, devices: int
) -> None:
    drawn = drawn_by(mode, [CHANGED] * len(SETTINGS), devices)
    assert drawn.scores is not None
    reader = LogprobReader(drawn.scores, VOCAB)
    for place, values in enumerate(expected(mode, CHANGED)):
        entry = reader.read(place, MAX_LOGPROBS)
        token = int(drawn.tokens[place])
        assert np.isfinite(entry.logprob)
        assert matches(entry.logprob, values[token])
        assert entry.rank == 1 + int((values > values[token]).sum())
        best = np.sort(values)[::-1][:MAX_LOGPROBS]
        assert all(map(matches, entry.top_logprobs, best))
        assert all(map(matches, entry.top_logprobs, values[list(entry.top_ids)]))


def test_a_known_token_outside_of_the_filters_has_no_probability() -> None:
    rows = [Row(wants_logprobs=True, target=token) for token in range(len(SETTINGS))]
    drawn = drawn_by("processed_logprobs", rows, 1)
    assert drawn.scores is not None
    reader = LogprobReader(drawn.scores, VOCAB)
    found = [reader.read(place, 0).logprob for place in range(len(rows))]
    wanted = [values[place] for place, values in enumerate(expected("processed_logprobs", Row()))]
    assert all(map(matches, found, wanted))
    assert -np.inf in found
    assert np.isfinite(found[-1]), "temperature 0 filters nothing"


def test_listed_ids_are_always_those_of_the_model() -> None:
    rows = [Row(wants_logprobs=True, scored=(5, 600), bias={5: 3.0})] * len(SETTINGS)
    drawn = drawn_by("processed_logits", rows, 1)
    assert drawn.scores is not None
    reader = LogprobReader(drawn.scores, VOCAB, has_listed=True)
    for place, values in enumerate(expected("raw_logprobs", Row())):
        entry = reader.read_listed(place, (5, 600))
        np.testing.assert_allclose(entry.top_logprobs, values[[5, 600]], atol=2e-5)
