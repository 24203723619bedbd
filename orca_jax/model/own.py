"""Decoders from outside this package: a class in a module that the user names, around this package's attention.

A model directory never names code: only `--decoder` and `LLM(decoder=...)` do.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import Table
from orca_jax.model.maker import Maker
from orca_jax.model.mixers.base import Attend, Mixing
from orca_jax.model.parameters import path_of
from orca_jax.model.sharding import MESH_AXES
from orca_jax.model.stages import whole
from orca_jax.model.transformer import Decoder
from orca_jax.model.trees.rows import TreeRow
from orca_jax.values.checks import first_line, load_class
from orca_jax.values.config import DType, ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import LayerKind

FAMILY = "own"
"""The family of configurations made by `own_config`."""


class OwnDecoder(Decoder):
    """Base class of decoders from outside this package. It replaces all of `Decoder`.

    A subclass has a constructor of these arguments, `__call__` and `unembedding`. Its parameters are made by `make`,
    or by modules of `flax.nnx`. Those of `make` are split over devices by their axes, the others are copied to each.
    The names of parameters are those of the stored tree, unless `tree_rows` or mapping.json says otherwise.

    Args:
        config: the configuration as the devices hold it.
        make: makes parameters; its type is that of the weights.
        vocab_rows: rows of the table of tokens, with padding.
    """

    is_switched = is_packed = is_stacked = False

    def __init__(self, config: ModelConfig, make: Maker, vocab_rows: int) -> None:
        raise NotImplementedError

    @classmethod
    def config_from_json(cls, values: Mapping[str, Any]) -> ModelConfig | None:
        """The configuration in config.json: `own_config` of its values; None if it is that of a known family.

        Raises:
            ConfigError: a value is wrong.
        """
        return None

    @classmethod
    def tree_rows(cls, config: ModelConfig) -> tuple[TreeRow, ...] | None:
        """The rows for a stored tree with other names than the parameters; None for the same names."""
        return None

    def __call__[Cache](  # type: ignore[override]  # without adapters
        self,
        inputs: Int[Array, "T"] | Float[Array, "T E"],
        positions: Int[Array, "T"],
        attend: Attend[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run all layers over the merged tokens of a batch, as `Decoder` does; `inputs` are token ids.

        Each layer passes its queries, keys and values to `attend` once, with its number from 0 on. Everything else
        must treat each token by itself.
        """
        raise NotImplementedError

    def run_layers[Cache](  # type: ignore[override]  # without adapters
        self,
        inputs: Int[Array, "T"] | Float[Array, "T E"],
        positions: Int[Array, "T"],
        mixing: Mixing[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run all layers for the engine, which gives the access to pages as an object. Do not override it."""
        return self(inputs, positions, mixing.attend, cache, keep)

    @property
    def unembedding(self) -> Table:
        """The table with the logits as its `scores`, of `vocab_rows` rows."""
        raise NotImplementedError

    def unstack(self, *, switched: bool = False) -> None:
        """Do nothing: layers are in the form that the class chose."""


def own_config(
    *,
    vocab_size: int,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    max_positions: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_dim: int | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> ModelConfig:
    """A configuration of the sizes that the engine needs; `others` are further fields of `ModelConfig`.

    `sliding_window` is the number of tokens in sight of each token in all layers, itself included; None: all before it.

    Raises:
        ConfigError: a size is not a positive integer, or the heads do not fit.
    """
    sizes = {
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "max_positions": max_positions,
        "num_kv_heads": num_heads,
        "head_dim": embed_dim // max(num_heads, 1),
        "mlp_dim": 4 * embed_dim,
    }
    own = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "mlp_dim": mlp_dim}
    sizes |= {name: size for name, size in own.items() if size is not None}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"config.json: {name} must be a positive integer, got {size!r}", param=name
            )
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        message = f"config.json: num_kv_heads {sizes['num_kv_heads']} does not divide num_heads {num_heads}"
        raise ConfigError(message, param="num_kv_heads")
    unused = {"norm": "layernorm", "norm_eps": 1e-5, "activation": "gelu", "gated_mlp": False}
    unused |= {
        "attention_bias": False,
        "mlp_bias": False,
        "tied_embeddings": False,
        "family": FAMILY,
    }
    layers = (LayerKind(window=sliding_window),) * sizes.pop("num_layers")
    return ModelConfig(layers=layers, **{**unused, **sizes, **others})


@cache
def own_class(name: str) -> type[OwnDecoder]:
    """The class "module:Class" or "file.py:Class". Imports the module, which runs its code.

    Raises:
        ConfigError: there is no such module or class, or the import fails.
    """
    found = load_class(name, "decoder")
    if issubclass(found, OwnDecoder):
        return found
    raise _wrong(f"{name} is not a subclass of orca_jax.model.own.OwnDecoder")


def build_own(
    name: str, config: ModelConfig, dtype: DType, rngs: nnx.Rngs, vocab_rows: int
) -> OwnDecoder:
    """Make the decoder of the class `name` with random values, and check it.

    Raises:
        ConfigError: its constructor fails, or it has something that cannot be served.
    """
    kind = own_class(name)
    try:
        decoder = kind(config, Maker(jnp.dtype(dtype), rngs), vocab_rows)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a class may end its process too
        raise _wrong(f"{name} cannot be made: {first_line(error)}") from error
    decoder.config, decoder.span = config, whole(config)
    decoder.num_layers = config.num_layers
    decoder.is_first = True
    table: Any = decoder.unembedding
    values = table.table if isinstance(table, Table) else None
    if not isinstance(values, nnx.Param) or values[...].shape != (vocab_rows, config.embed_dim):
        raise _wrong(
            f"{name}: unembedding must be a Table of shape [{vocab_rows}, {config.embed_dim}]"
        )
    _check_parameters(name, decoder)
    state = nnx.state(decoder)
    # those of flax.nnx too
    nnx.update(decoder, jax.tree.map(lambda value: value.astype(jnp.dtype(dtype)), state))
    return decoder


def _check_parameters(name: str, decoder: OwnDecoder) -> None:
    for keys, variable in nnx.to_flat_state(nnx.state(decoder)):
        path = path_of(keys)
        axes = variable.get_metadata("axes", None)
        if not isinstance(variable, nnx.Param) or not jnp.issubdtype(
            variable.get_value().dtype, jnp.floating
        ):
            kind = type(variable).__name__
            raise _wrong(
                f"{name}: {path} is a {kind}; a served decoder has parameters only, and no dropout"
            )
        shape = variable.get_value().shape
        if axes is not None and (len(axes) != len(shape) or not set(axes) <= MESH_AXES.keys()):
            known = ", ".join(MESH_AXES)
            raise _wrong(
                f"{name}: {path} of shape {list(shape)} has the axes {axes}; each must be one of {known}"
            )


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"decoder: {problem}", param="decoder")
