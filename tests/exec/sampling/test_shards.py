"""Samplers give the same tokens and log probabilities, to the last bit, on every number of shards."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from orca_jax.exec.sampling.draw import WINDOW, Kind, SamplingParameters, sample
from orca_jax.exec.sampling.programs import Drawn, pack_masks, sample_full
from orca_jax.exec.sampling.search import largest
from orca_jax.model.load import tensor_mesh
from orca_jax.model.sharding import TENSOR_AXIS, VOCAB_BLOCK
from tests.exec.sampling.test_adjust import TABLE, context_of, extras_of

MESHES = (1, 3, 8)
pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
VOCAB = 1937  # 16 blocks: on three and on eight shards, the last one has padding or little else
ROWS = 64


def settings(rows: int) -> SamplingParameters:
    """Rows of every kind: greedy, unfiltered, ended within the window by each filter, and wider by each filter."""
    filters = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 40, 1.0, 0.0),
        (0.8, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.0, 9, 0.9, 0.05),
        (1.0, 300, 1.0, 0.0),  # wide from here on
        (3.0, 900, 0.9, 0.0),
        (3.0, 0, 0.95, 0.0),
        (3.0, 0, 0.99, 0.001),
        (4.0, 0, 1.0, 0.01),
        (4.0, 1936, 0.5, 0.0),
    ]
    columns = np.array([filters[row % len(filters)] for row in range(rows)]).T
    temperature, top_k, top_p, min_p = columns
    numbers = jnp.arange(rows, dtype=jnp.int32)
    return SamplingParameters(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
        jnp.asarray(min_p, jnp.float32),
        numbers,
        numbers * 7,
        numbers + 3,
    )


def some_logits(seed: int) -> NDArray[np.float32]:
    """Rows of many scales. Every second one is rounded, so that there are ties at each boundary."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, random.uniform(0.1, 5, (ROWS, 1)), (ROWS, VOCAB)).astype(np.float32)
    logits[::2] = logits[::2].round(1)
    return logits


def sharded(logits: NDArray[np.float32], devices: int) -> jax.Array:
    """The logits over a mesh, with padding larger than every token."""
    multiple = VOCAB_BLOCK * devices
    padding = -logits.shape[1] % multiple
    padded = np.pad(logits, ((0, 0), (0, padding)), constant_values=99.0)
    return jax.device_put(
        padded,
        NamedSharding(tensor_mesh(jax.devices()[:devices]), PartitionSpec(None, TENSOR_AXIS)),
    )


@cache
def sampler(devices: int, kind: Kind):
    return jax.jit(
        partial(sample, vocab_size=VOCAB, mesh=tensor_mesh(jax.devices()[:devices]), kind=kind)
    )


def draw(
    logits: NDArray[np.float32],
    devices: int,
    kind: Kind = "plain",
    wanted: SamplingParameters | None = None,
) -> list[int]:
    tokens, finite = sampler(devices, kind)(sharded(logits, devices), wanted or settings(ROWS))
    assert np.asarray(finite).all()
    return np.asarray(tokens).tolist()


@pytest.mark.parametrize(
    "devices", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 8))]
)
def test_draws_do_not_depend_on_the_number_of_shards(devices: int) -> None:
    for seed in range(8):
        logits = some_logits(seed)
        assert draw(logits, devices) == draw(logits, 1)


@pytest.mark.parametrize("kind", ["greedy", "unfiltered"])
def test_samplers_without_branches_draw_as_the_plain_one(kind: Kind) -> None:
    wanted = settings(ROWS)
    if kind == "greedy":
        wanted = wanted._replace(temperature=jnp.zeros(ROWS))
    none = jnp.zeros(ROWS)
    wanted = wanted._replace(top_k=jnp.zeros(ROWS, jnp.int32), top_p=none + 1, min_p=none)
    logits = some_logits(9)
    expected = draw(logits, 1, wanted=wanted)
    for devices in (1, 3):
        assert draw(logits, devices, kind, wanted) == expected


def test_filters_without_branches_draw_as_the_plain_sampler() -> None:
    """Also greedy rows, those within the window, and those of wider nuclei; a wider top-k is not of this kind."""
    wanted = settings(ROWS)
    wanted = wanted._replace(top_k=jnp.where(wanted.top_k > WINDOW, 0, wanted.top_k))
    for seed in range(4):
        logits = some_logits(seed)
        expected = draw(logits, 1, wanted=wanted)
        for devices in (1, 3):
            assert draw(logits, devices, "filtered", wanted) == expected


@pytest.mark.parametrize("width", [128, 5120, 40960], ids=["all", "small blocks", "both sizes"])
def test_the_largest_numbers_by_blocks(width: int) -> None:
    """Equal numbers are in the order of their columns, within a block and across blocks."""
    random = np.random.default_rng(width)
    values = random.normal(size=(4, width)).astype(np.float32)
    values[1:] = values[1:].round(1)
    values[2] = 0.0
    values[3, width // 3 :] = -np.inf
    given = jnp.asarray(values), min(WINDOW, width)
    assert all(map(np.array_equal, largest(*given), lax.top_k(*given)))


def test_ties_and_padding_across_shards() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0, [300, 1500]] = 9.0  # in different shards
    logits[1] = -5.0  # padding is larger than every token
    greedy = settings(ROWS)._replace(temperature=jnp.zeros(ROWS))
    for devices in MESHES:
        assert draw(logits, devices, wanted=greedy)[:3] == [300, 0, 0]
    bad = logits.copy()
    bad[5, VOCAB - 1] = np.nan
    for devices in (1, 8):
        _, finite = sampler(devices, "plain")(sharded(bad, devices), greedy)
        assert np.flatnonzero(~np.asarray(finite)).tolist() == [5]


@cache
def full_sampler(devices: int):
    return jax.jit(
        partial(sample_full, vocab_size=VOCAB, mesh=tensor_mesh(jax.devices()[:devices]))
    )


def draw_fully(logits: NDArray[np.float32], devices: int) -> Drawn:
    columns, rows = sharded(logits, devices), TABLE
    sets = [
        None if row.allowed is None else sum(1 << token for token in row.allowed) for row in rows
    ]
    masks = jnp.asarray(pack_masks(sets, len(rows), columns.shape[1]))
    drawn = full_sampler(devices)(
        columns, settings(len(rows)), extras_of(rows), context_of(rows), masks
    )
    return jax.tree.map(np.asarray, drawn)


@pytest.mark.parametrize("devices", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_changed_logits_and_log_probabilities_do_not_depend_on_the_number_of_shards(
    devices: int,
) -> None:
    logits = some_logits(10)[: len(TABLE)]
    expected = jax.tree.leaves(draw_fully(logits, 1))
    for one, other in zip(jax.tree.leaves(draw_fully(logits, devices)), expected, strict=True):
        np.testing.assert_array_equal(one, other)
