"""Bias, penalties and masks against the formulas of OpenAI and Hugging Face, on one device and on shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from orca_jax.exec.sampling.adjust import Context, Extras, change_logits
from orca_jax.exec.sampling.draw import SamplingParameters, VocabularyShards, sample
from orca_jax.exec.sampling.programs import Drawn, pack_masks, sample_full
from orca_jax.model.load import tensor_mesh
from orca_jax.model.sharding import TENSOR_AXIS
from orca_jax.values.request import MAX_LOGIT_BIAS

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
VOCAB, COLUMNS, LONGEST, ROWS = 1000, 1024, 300, 4
EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class Row:
    """The settings and the context of one row of the sampler."""

    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    wants_logprobs: bool = False
    scored: Sequence[int] = ()
    target: int | None = None


def extras_of(rows: Sequence[Row]) -> Extras:
    ids, values = (np.zeros((len(rows), MAX_LOGIT_BIAS), kind) for kind in (np.int32, np.float32))
    for place, row in enumerate(rows):
        first = len(row.scored)
        end = first + len(row.bias)
        ids[place, :end] = [*row.scored, *row.bias]
        values[place, first:end] = list(row.bias.values())
    integers = {
        "num_prompt": [len(row.prompt) for row in rows],
        "wants_logprobs": [row.wants_logprobs for row in rows],
        "wants_top": [row.wants_logprobs for row in rows],
        "num_scored": [len(row.scored) for row in rows],
        "has_target": [row.target is not None for row in rows],
        "target": [row.target or 0 for row in rows],
    }
    numbers = {
        each.name: [getattr(row, each.name) for row in rows]
        for each in fields(Row)
        if isinstance(each.default, float)
    }
    return Extras(
        listed_id=jnp.asarray(ids),
        bias=jnp.asarray(values),
        **{name: jnp.array(column, jnp.int32) for name, column in integers.items()},
        **{name: jnp.array(column, jnp.float32) for name, column in numbers.items()},
    )


def context_of(rows: Sequence[Row]) -> Context:
    """A table with each row's history at another place. Ids after its end must not count."""
    history = np.random.default_rng(9).integers(0, VOCAB, (len(rows) + 1, LONGEST)).astype(np.int32)
    for place, row in enumerate(rows):
        ids = [*row.prompt, *row.generated]
        history[len(rows) - place, : len(ids)] = ids
    order = np.arange(len(rows), 0, -1, dtype=np.int32)
    lengths = np.array([len(row.prompt) + len(row.generated) for row in rows], np.int32)
    return Context(jnp.asarray(history), jnp.asarray(order), jnp.asarray(lengths))


def masks_of(rows: Sequence[Row]) -> jax.Array:
    sets = [
        None if row.allowed is None else sum(1 << token for token in row.allowed) for row in rows
    ]
    return jnp.asarray(pack_masks(sets, len(rows), COLUMNS))


def oracle(logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
    """One row, computed by the published formulas."""
    out = logits.astype(np.float64)
    for token, bias in row.bias.items():
        out[token] += bias
    for token in {*row.prompt, *row.generated}:  # RepetitionPenaltyLogitsProcessor
        out[token] = out[token] * row.repetition if out[token] < 0 else out[token] / row.repetition
    # "mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"
    for token in set(row.generated):
        out[token] -= list(row.generated).count(token) * row.frequency + row.presence
    if row.allowed is not None:
        out[[token for token in range(len(out)) if token not in row.allowed]] = -np.inf
    return out


@cache
def changing(devices: int):
    """`change_logits` over shards of the vocabulary."""
    return jax.jit(
        jax.shard_map(
            partial(change_logits, shards=VocabularyShards(VOCAB, TENSOR_AXIS)),
            mesh=tensor_mesh(jax.devices()[:devices]),
            in_specs=(PartitionSpec(None, TENSOR_AXIS), EVERYWHERE, EVERYWHERE, EVERYWHERE),
            out_specs=PartitionSpec(None, TENSOR_AXIS),
            check_vma=False,
        )
    )


def changed(
    logits: NDArray[np.float32], rows: Sequence[Row], devices: int = 1
) -> NDArray[np.float32]:
    return np.asarray(
        changing(devices)(jnp.asarray(logits), extras_of(rows), context_of(rows), masks_of(rows))
    )


def some_logits(seed: int = 0, rows: int = ROWS) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (rows, COLUMNS)).astype(np.float32)


LONG = list(np.random.default_rng(5).integers(0, VOCAB, 290))
TABLE = [
    Row(),
    Row([1, 2, 3], [4, 5, 4], presence=0.7),
    Row([1, 2, 3], [4, 5, 4, 999], frequency=-1.3),
    Row([1, 2, 3, 3, 999], [4, 5, 4], repetition=1.8),
    Row([7, 8], [7, 7, 9], repetition=0.4, presence=2.0, frequency=0.5),
    Row(LONG[:200], LONG[200:], repetition=1.1, presence=0.5, frequency=0.25),
    Row(LONG[:128], [], repetition=1.5, presence=2.0),
    Row([], LONG[:256], frequency=0.1),
    Row([1], [2], bias={0: 3.5, 64: -100.0, 127: 100.0, 128: 1.0, 999: -0.5}),
    Row([1], [2], bias={token: token / 100 for token in range(MAX_LOGIT_BIAS)}),
    Row([1, 2], [3], bias={3: 5.0}, repetition=2.0, presence=1.0),
    Row(allowed=frozenset({5})),
    Row(allowed=frozenset({0, 31, 32, 63, 64, 127, 128, 999})),
    Row([5, 6], [6], repetition=3.0, bias={6: 50.0}, allowed=frozenset({5, 6, 900})),
    Row(allowed=frozenset(range(VOCAB))),
    Row(wants_logprobs=True, target=3),
]


@pytest.mark.parametrize(
    "devices", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)), 8]
)
def test_every_formula_on_every_mesh(devices: int) -> None:
    """On eight shards each one has a single block of the vocabulary."""
    for start in range(0, len(TABLE), ROWS):
        rows = TABLE[start : start + ROWS]
        logits = some_logits(start, len(rows))
        expected = np.stack([oracle(*pair) for pair in zip(logits, rows, strict=True)])
        np.testing.assert_allclose(
            changed(logits, rows, devices)[:, :VOCAB], expected[:, :VOCAB], rtol=1e-5, atol=1e-5
        )


ids = st.integers(0, VOCAB - 1)
any_row = st.builds(
    Row,
    prompt=st.lists(ids, max_size=140),
    generated=st.lists(ids, max_size=140),
    presence=st.sampled_from([0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, 2.0]),
    repetition=st.sampled_from([1.0, 1.2, 0.5]),
    bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=20),
    allowed=st.none() | st.frozensets(ids, min_size=1, max_size=30),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(any_row, min_size=ROWS, max_size=ROWS), st.integers(0, 99))
def test_any_mix_of_rows_is_each_rows_own_formula(rows: list[Row], seed: int) -> None:
    logits = some_logits(seed)
    expected = np.stack([oracle(*pair) for pair in zip(logits, rows, strict=True)])
    np.testing.assert_allclose(
        changed(logits, rows)[:, :VOCAB], expected[:, :VOCAB], rtol=1e-5, atol=1e-4
    )


def parameters(temperatures: Sequence[float]) -> SamplingParameters:
    rows = len(temperatures)
    zeros, ones = jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.float32)
    seeds = jnp.arange(rows, dtype=jnp.int32)
    return SamplingParameters(
        jnp.array(temperatures, jnp.float32),
        zeros,
        ones,
        jnp.zeros(rows, jnp.float32),
        zeros,
        seeds,
        zeros,
    )


@cache
def sampling(devices: int = 1):
    return jax.jit(
        partial(sample_full, vocab_size=VOCAB, mesh=tensor_mesh(jax.devices()[:devices]))
    )


def draw(
    logits: NDArray[np.float32], rows: Sequence[Row], wanted: SamplingParameters, devices: int = 1
) -> Drawn:
    """The draws of rows; few of them get padding, so that tests share the program of as many rows as the table has."""
    count, padding = len(rows), max(0, len(TABLE) - len(rows))
    rows = [*rows, *[Row()] * padding]
    padded = [
        jnp.asarray(np.pad(each, [(0, padding)] + [(0, 0)] * (each.ndim - 1)))
        for each in (logits, *wanted)
    ]
    values = (
        padded[0],
        SamplingParameters(*padded[1:]),
        extras_of(rows),
        context_of(rows),
        masks_of(rows),
    )
    return jax.tree.map(lambda part: np.asarray(part)[:count], sampling(devices)(*values))


@pytest.mark.parametrize(
    "devices", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
def test_greedy_takes_the_best_of_the_changed_logits(devices: int) -> None:
    logits = some_logits(1, len(TABLE))
    expected = [
        int(oracle(line[:VOCAB], row).argmax()) for line, row in zip(logits, TABLE, strict=True)
    ]
    drawn = draw(logits, TABLE, parameters([0.0] * len(TABLE)), devices)
    assert drawn.tokens.tolist() == expected
    assert drawn.finite.all(), "biases and masks do not make a row's own logits infinite"


def test_draws_follow_the_changed_distribution() -> None:
    row = Row(
        [1, 2, 3],
        [3, 4, 4],
        presence=0.5,
        repetition=1.3,
        bias={9: 4.0},
        allowed=frozenset(range(40)),
    )
    logits, count = some_logits(2, 1)[0], 4096
    weights = np.exp(oracle(logits[:VOCAB], row) / 0.8)
    expected = weights / weights.sum()
    tokens = draw(np.tile(logits, (count, 1)), [row] * count, parameters([0.8] * count)).tokens
    observed = np.bincount(tokens, minlength=VOCAB) / count
    noise = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(observed - expected) < 5 * noise + 3 / count).all()
    assert not observed[40:].any(), "outside the mask"


@pytest.mark.parametrize(
    "devices", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
def test_without_extras_the_full_sampler_draws_as_the_plain_one(devices: int) -> None:
    """Also with a full mask, and beside other rows with any settings."""
    logits = some_logits(3, 16)
    wanted = parameters([0.0, 0.7, 1.0, 1.5] * 4)
    plain = jax.jit(partial(sample, vocab_size=VOCAB, mesh=tensor_mesh(jax.devices()[:1])))
    expected = np.asarray(plain(jnp.asarray(logits), wanted)[0]).tolist()
    no_extras = [Row(allowed=frozenset(range(VOCAB)) if place % 2 else None) for place in range(16)]
    assert draw(logits, no_extras, wanted, devices).tokens.tolist() == expected
    mixed = no_extras[:8] + [replace(row, wants_logprobs=True) for row in TABLE[:8]]
    assert draw(logits, mixed, wanted, devices).tokens.tolist()[:8] == expected[:8]


def test_a_row_with_extras_draws_the_same_alone_and_on_two_shards() -> None:
    logits, wanted = some_logits(4, len(TABLE)), parameters([1.0] * len(TABLE))
    together = draw(logits, TABLE, wanted).tokens.tolist()
    assert draw(logits, TABLE, wanted, 2).tokens.tolist() == together
    for place in (5, 13):
        alone = SamplingParameters(*(value[place : place + 1] for value in wanted))
        assert (
            draw(logits[place : place + 1], TABLE[place : place + 1], alone).tokens[0]
            == together[place]
        )
