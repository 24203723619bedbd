"""Random weights that the tests of a process share: the program that draws them is as large as a small model's."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh

from orca_jax.model import load
from orca_jax.model.stages import LayerSpan
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, ModelConfig

MOST_BYTES = 16 << 20


@contextmanager
def drawn_once() -> Iterator[None]:
    """Draw the weights of equal small models once. No engine writes into them."""
    draw = load.random_decoder
    drawn: dict[Hashable, tuple[Any, Any]] = {}

    def again(
        config: ModelConfig,
        *,
        dtype: DType,
        mesh: Mesh,
        seed: int = 0,
        span: LayerSpan | None = None,
    ) -> Decoder:
        key = config, dtype, mesh, seed, span
        if key in drawn:
            merged: Decoder = nnx.merge(*drawn[key])
            return merged
        decoder = draw(config, dtype=dtype, mesh=mesh, seed=seed, span=span)
        structure, values = nnx.split(decoder)
        size = sum(value.nbytes for value in jax.tree.leaves(values))
        if config.decoder is None and size <= MOST_BYTES:  # the code of own decoders may change
            drawn[key] = structure, values
        return decoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "random_decoder", again)
        yield
