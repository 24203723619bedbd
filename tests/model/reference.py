"""The common code of the model's tests: the models of scripts/make_reference.py, and attention in five lines."""

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from orca_jax.model.load import tensor_mesh
from orca_jax.model.transformer import Decoder

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference"
NAMES = sorted(path.name for path in REFERENCE.iterdir())
PADDED = 48


def mesh_of(size: int) -> Mesh:
    return tensor_mesh(jax.devices()[:size])


def dense_causal(
    layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, cache: int, *, window: int | None = None
) -> tuple[jax.Array, int]:
    """Attention over all tokens of one request, or over the last `window` ones."""
    tokens, heads, dim = q.shape
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k) * dim**-0.5
    ahead = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    scores = jnp.where((ahead >= 0) & (ahead < (window or tokens)), scores, -jnp.inf)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v), cache


@cache
def _forward() -> Callable[[Decoder, jax.Array], jax.Array]:
    def forward(decoder: Decoder, ids: jax.Array) -> jax.Array:
        attend = partial(dense_causal, window=decoder.config.sliding_window)
        hidden, _ = decoder(ids, jnp.arange(ids.shape[0], dtype=jnp.int32), attend, 0)
        return decoder.unembed(hidden)

    return jax.jit(forward)


def logits(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Logits of every position, padded to one length so that a model compiles once."""
    padded = jnp.asarray(np.pad(ids, (0, PADDED - len(ids))).astype(np.int32))
    return np.asarray(_forward()(decoder, padded))[: len(ids), : decoder.config.vocab_size]


def copy_of(name: str, directory: Path) -> Path:
    """A copy of a model, for a test to break."""
    return Path(shutil.copytree(REFERENCE / name, directory / name))
