"""Samplers whose unembedding skips the places that are not in use, against samplers of all places."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.exec.rows import EXTRA_COLUMNS
from orca_jax.exec.sampling import programs
from orca_jax.exec.sampling.programs import (
    draws_layout,
    extras_layout,
    make_full_sampler,
    make_plain_sampler,
)
from orca_jax.model.layers import Table
from orca_jax.model.load import tensor_mesh

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
PLACES, VOCAB, ROWS = 20, 256, 32


class Skipping(Table):
    """A table that cannot score the vectors after the first `count`."""

    def __init__(self, table: jax.Array) -> None:
        self.values = table

    @property
    def can_skip(self) -> bool:
        return True

    @property
    def num_rows(self) -> int:
        return VOCAB

    def scores(self, hidden: jax.Array, count: jax.Array | None = None) -> jax.Array:
        assert count is not None
        return jnp.where(jnp.arange(len(hidden))[:, None] < count, hidden @ self.values.T, jnp.nan)


class Whole(Skipping):
    """The same table, which scores all vectors."""

    @property
    def can_skip(self) -> bool:
        return False

    def scores(self, hidden: jax.Array, count: jax.Array | None = None) -> jax.Array:
        assert count is None
        return hidden @ self.values.T


def draws(count: int) -> np.ndarray:
    """Draws of `count` places, some of them greedy; the others are padding."""
    layout = draws_layout(PLACES)
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    view["row"][:] = ROWS
    view["row"][:count] = np.arange(count)[::-1]
    view["position"][:count] = 1 + np.arange(count)
    view["temperature"][:count] = np.arange(count) % 3
    view["top_p"][:], view["seed_low"][:count] = 0.9, np.arange(count)
    return vector


def extras() -> np.ndarray:
    """Neutral values, but log probabilities in some groups."""
    layout = extras_layout(PLACES)
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    for name, column in EXTRA_COLUMNS.items():
        view[name][:] = column.neutral
    view["wants_logprobs"][8:10] = view["wants_top"][8:10] = 1
    return vector


@cache
def sampler(table: type[Table], name: str):
    make = make_full_sampler if name == "full" else make_plain_sampler
    return jax.jit(
        make(lambda weights: table(weights[0]), PLACES, VOCAB, tensor_mesh(jax.devices()[:1]))
    )


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "full"])
def test_places_in_use_have_the_same_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have 8 places. The last one begins 8 before the end."""
    monkeypatch.setattr(programs, "_GROUP_SCORES", 0)
    draw = np.random.default_rng(0)
    table, hidden = (
        jnp.asarray(draw.standard_normal((size, 32)), jnp.float32) for size in (VOCAB, PLACES)
    )
    last = jnp.full(ROWS, -1, jnp.int32)
    more = []
    if name == "full":
        more = [
            jnp.zeros((ROWS, 40), jnp.int32),
            extras(),
            jnp.full((PLACES, VOCAB // 32), -1, jnp.int32),
        ]
    for count in (0, 1, 8, 9, 16, 17, PLACES):
        found, wanted = (
            sampler(kind, name)([table], last, hidden, draws(count), *more)
            for kind in (Skipping, Whole)
        )
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1].tokens[:count], wanted[1].tokens[:count])
        assert np.asarray(found[1].finite)[:count].all()
        if name == "full" and count > 9:
            for values, others in zip(found[1].scores.top, wanted[1].scores.top, strict=True):
                np.testing.assert_allclose(values[8:10], others[8:10], rtol=1e-6)
