"""Layers with several windows and rotary positions, over pages: scanned as on a TPU, and unrolled as on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.exec.cache import allocate_caches
from orca_jax.exec.layers import flatten_module, make_layers, window_of_layer
from orca_jax.exec.pack import Batch
from orca_jax.kernels.ragged_attention import NO_WINDOW, RowArrays
from orca_jax.model.load import load_decoder
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig
from tests.model.reference import REFERENCE, mesh_of

PAGE_SIZE, NUM_PAGES = 8, 6


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gemma3-with-images", "scanned"),
        pytest.param("gemma3-with-images", "unrolled", marks=pytest.mark.slow),
        *(
            pytest.param("gemma3", form, marks=pytest.mark.slow)
            for form in ("scanned", "unrolled", "switched")
        ),
        pytest.param("gemma2", "switched", marks=pytest.mark.slow),
    ],
)
def test_every_form_of_the_layers_is_the_same_model(name: str, form: str) -> None:
    """A prompt of 33 tokens whose pages are in reverse order; windows end within pages and between them."""
    mesh, expected = mesh_of(1), np.load(REFERENCE / name / "expected.npz")
    ids, logits = jnp.asarray(expected["ids_3"]), expected["logits_3"]
    decoder = load_decoder(REFERENCE / name, dtype="float32", mesh=mesh)
    if form != "scanned":
        decoder.unstack(switched=form == "switched")
    model, tokens = decoder.config, len(ids)
    cache = CacheConfig(one_group(model.layer_caches), (NUM_PAGES,), PAGE_SIZE, "float32")
    config = ExecutorConfig("float32", 1, (tokens,), 1, 64, cache, "xla")
    structure, weights = flatten_module(decoder)
    layers = jax.jit(make_layers(structure, model, config, mesh))
    row = jnp.zeros(tokens, jnp.int32)
    length = jnp.array([tokens], jnp.int32)
    requests = RowArrays(
        jnp.arange(NUM_PAGES, dtype=jnp.int32)[None, ::-1], row[:1], length, length
    )
    batch = Batch(ids, row > 0, row, jnp.arange(tokens, dtype=jnp.int32), (requests,), row[:0])
    _, _, hidden = layers(weights, allocate_caches(config, model, mesh), None, batch, ids, None)
    ours = np.asarray(decoder.unembed(hidden))[:, : model.vocab_size]
    assert np.abs(ours - logits).max() <= 2e-5 * np.abs(logits).max()


def test_a_window_is_a_constant_if_possible() -> None:
    assert window_of_layer([7, 7], jnp.int32(1)) == 7
    assert window_of_layer([None, None], jnp.int32(1)) is None
    assert [window_of_layer([7, None], layer) for layer in (0, 1)] == [7, None]
    traced = [window_of_layer([7, None], jnp.int32(layer)) for layer in (0, 1)]
    assert all(isinstance(window, jax.Array) for window in traced) and traced == [7, NO_WINDOW]
