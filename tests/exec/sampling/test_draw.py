"""The sampler against a sorting oracle in numpy."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from orca_jax.exec.sampling.draw import SamplingParameters, sample
from orca_jax.exec.sampling.programs import draws_layout, kind_of_draws
from orca_jax.model.load import tensor_mesh

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
DRAWS = 4096
VOCAB, ROWS = 640, 64  # of the program that most tests share


def parameters(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParameters:
    return SamplingParameters(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.full(rows, 5, jnp.int32),
    )


@cache
def jitted(vocab_size: int, devices: int = 1):
    return jax.jit(
        partial(sample, vocab_size=vocab_size, mesh=tensor_mesh(jax.devices()[:devices]))
    )


def draw(
    logits: NDArray[np.float32], wanted: SamplingParameters, vocab_size: int = VOCAB
) -> NDArray[np.int32]:
    tokens, finite = jitted(vocab_size)(jnp.asarray(logits), wanted)
    assert np.asarray(finite).all()
    return np.asarray(tokens)


def padded(
    logits: NDArray[np.float32], wanted: SamplingParameters
) -> tuple[NDArray[np.float32], SamplingParameters]:
    """The same rows and greedy ones after them, for the shared program."""
    rows = (0, ROWS - len(logits))
    return np.pad(logits, (rows, (0, 0))), SamplingParameters(
        *(jnp.asarray(np.pad(each, rows)) for each in wanted)
    )


def distribution(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.float64]:
    """By sorting: temperature, then top-k, then top-p on the rest, then min-p."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    mass = np.exp(scaled[order] - scaled.max())
    mass[top_k or len(mass) :] = 0
    mass /= mass.sum()
    mass[np.cumsum(mass) - mass >= top_p] = 0
    mass[mass < min_p * mass[0]] = 0
    out = np.zeros(len(mass))
    out[order] = mass / mass.sum()
    return out


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 40, 0.5, 0.0),
    (1.0, 0, 1.0, 0.1),  # min-p ends within the window, and nothing else does
    (1.0, 12, 0.8, 0.2),
    (1.0, 0, 0.6, 0.01),
    (0.8, 0, 1.0, 1.0),  # only the most probable
    (1.0, 300, 1.0, 0.05),
    # More than the window:
    (1.0, 300, 1.0, 0.0),
    (2.0, 400, 0.9, 0.0),
    (4.0, 300, 0.5, 0.0),  # a nucleus within the window, after a wider top-k
    (4.0, 0, 1.0, 0.2),
    (4.0, 480, 0.97, 0.15),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), CASES)
def test_draws_follow_the_filtered_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """512 columns with 500 tokens; the rest is padding."""
    vocab_size = 500
    logits = np.random.default_rng(0).normal(0, 1.5, 512).astype(np.float32)
    logits[vocab_size:] = 50.0  # padding must never win
    expected = distribution(logits[:vocab_size], temperature, top_k, top_p, min_p)
    tokens = draw(
        np.tile(logits, (DRAWS, 1)), parameters(DRAWS, temperature, top_k, top_p, min_p), vocab_size
    )
    assert (expected[tokens] > 0).all(), "a token outside the filters was drawn"
    observed = np.bincount(tokens, minlength=vocab_size) / DRAWS
    noise = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(observed - expected) < 5 * noise + 3 / DRAWS).all()


def test_temperature_zero_is_greedy_also_beside_rows_that_draw() -> None:
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    wanted = parameters(ROWS)._replace(temperature=jnp.asarray(np.arange(ROWS) % 2, jnp.float32))
    tokens = draw(logits, wanted)
    assert (tokens[::2] == logits.argmax(-1)[::2]).all()
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).any()


def test_ties_go_to_the_first_token_when_greedy() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 9]] = 1.0
    assert draw(*padded(logits, parameters(1, temperature=0.0)))[0] == 3


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCAB)).astype(np.float32)
    top_p, top_k = (
        np.linspace(0.1, 1.0, ROWS, dtype=np.float32),
        np.arange(ROWS, dtype=np.int32) * 10,
    )
    wanted = parameters(ROWS)._replace(top_p=jnp.asarray(top_p), top_k=jnp.asarray(top_k))
    together = draw(logits, wanted)
    for row in (0, 7, 31, 63):
        alone = SamplingParameters(
            *(jnp.asarray(np.asarray(value)[row : row + 1]) for value in wanted)
        )
        assert draw(logits[row : row + 1], alone)[0] == together[row]


def test_the_seed_and_the_position_decide_and_all_64_bits_count() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    wanted = parameters(4)._replace(
        seed_high=jnp.array([0, 0, 1, 0], jnp.int32),
        seed_low=jnp.array([1, 1, 1, 1], jnp.int32),
        position=jnp.array([5, 6, 5, 5], jnp.int32),
    )
    first, other_position, other_high, same = draw(*padded(logits, wanted))[:4]
    assert first == same
    assert len({first, other_position, other_high}) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_drawn(bad: float) -> None:
    logits = np.random.default_rng(3).normal(size=(3, VOCAB)).astype(np.float32)
    logits[1, 40] = bad
    tokens, finite = jitted(VOCAB)(*padded(logits, parameters(3, 0.0)))
    assert np.asarray(finite)[:3].tolist() == [True, False, True]
    assert [int(tokens[0]), int(tokens[2])] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert 0 <= int(tokens[1]) < VOCAB


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([], "greedy"),
        ([(0.0, 5, 0.5, 0.1)], "greedy"),
        ([(0.7, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.1)], "unfiltered"),
        ([(0.7, 0, 1.0, 0.0), (1.0, 256, 1.0, 0.0)], "filtered"),
        ([(0.7, 0, 0.9, 0.0)], "filtered"),
        ([(0.7, 0, 1.0, 0.1), (0.0, 300, 1.0, 0.0)], "filtered"),
        ([(0.7, 0, 0.9, 0.0), (1.0, 257, 1.0, 0.0)], "plain"),
    ],
)
def test_a_launch_is_of_the_least_kind_that_serves_all_rows(
    rows: list[tuple[float, int, float, float]], kind: str
) -> None:
    layout = draws_layout(4)
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    for place, row in enumerate(rows):
        for name, value in zip(("temperature", "top_k", "top_p", "min_p"), row, strict=True):
            view[name][place] = value
    assert kind_of_draws(vector, layout) == kind
