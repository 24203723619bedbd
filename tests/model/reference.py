"""The common code of the model's tests: the models of scripts/make_reference.py, and attention in five lines."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from orca_jax.model import load
from orca_jax.model.load import tensor_mesh
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, ModelConfig

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference"
NAMES = sorted(path.name for path in REFERENCE.iterdir())
PADDED = 48


def mesh_of(size: int) -> Mesh:
    return tensor_mesh(jax.devices()[:size])


def random_of(config: ModelConfig, dtype: DType, devices: int) -> Decoder:
    """A decoder with random weights, which are drawn once in a process."""
    return load.random_decoder(config, dtype=dtype, mesh=mesh_of(devices))


def dense_attention(config: ModelConfig) -> Callable[..., tuple[jax.Array, int]]:
    """Causal attention over all tokens of one request, in the window of each layer."""
    windows = jnp.array([kind.window or PADDED for kind in config.layers])
    kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def attend(
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: int,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, int]:
        if k is None or v is None:
            assert isinstance(layer, int)
            k, v = kept[config.layer_of_pages(layer)]
        elif config.shares_keys and isinstance(layer, int):
            kept[layer] = k, v
        tokens, heads, _ = q.shape
        k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) * config.score_scale
        if config.attention_soft_cap is not None:
            scores = config.attention_soft_cap * jnp.tanh(scores / config.attention_soft_cap)
        ahead = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
        scores = jnp.where((ahead >= 0) & (ahead < windows[layer]), scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(sinks[:, None, None], (heads, tokens, 1))], axis=2
            )
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores)[..., :tokens], v), cache

    return attend


@cache
def _forward() -> Callable[[Decoder, jax.Array], jax.Array]:
    def forward(decoder: Decoder, ids: jax.Array) -> jax.Array:
        attend = dense_attention(decoder.config)
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
