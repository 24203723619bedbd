"""Load a decoder by name, with its parameters sharded over a mesh."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from orca_jax.helpers.bundled import is_gguf, is_preset
from orca_jax.helpers.console import Progress
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.kernels.native import Library
from orca_jax.model.checkpoint import load_orbax
from orca_jax.model.describe import read_model_config
from orca_jax.model.files.folder import SafetensorsFolder
from orca_jax.model.gguf.weights import GgufFile
from orca_jax.model.orbax_files import orbax_root
from orca_jax.model.own import build_own
from orca_jax.model.parameters import Wanted
from orca_jax.model.published.load import has_mxfp4, keep_published, load_published
from orca_jax.model.sharding import (
    TENSOR_AXIS,
    on_shards,
    padded_vocab,
    param_shardings,
    tensor_parallel_size,
    uneven_parts,
)
from orca_jax.model.stages import LayerSpan, whole
from orca_jax.model.transformer import Decoder
from orca_jax.model.weight_files import check_weights, has_safetensors
from orca_jax.model.weights import load_safetensors, with_true_head
from orca_jax.values.config import DType, LoadFormat, ModelConfig
from orca_jax.values.errors import ConfigError

logger = logging.getLogger(__name__)

type KeepBits = Callable[[Decoder, Library | None, int], None]
"""A function that gives matrices the form of their bits in the files, for a library or XLA, and so many devices."""


def tensor_mesh(devices: list[Any]) -> Mesh:
    """A mesh of `devices` along the tensor axis. XLA propagates shardings on it by itself."""
    return Mesh(np.array(devices), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def decoder_builder(
    config: ModelConfig,
    dtype: DType,
    mesh: Mesh | AbstractMesh,
    seed: int = 0,
    span: LayerSpan | None = None,
) -> Callable[[], Decoder]:
    """A function to trace that creates the decoder, or one stage of it, with random values for a mesh."""
    shards = tensor_parallel_size(mesh)
    rows = padded_vocab(config, shards)
    held = on_shards(config, shards)
    if (name := config.decoder) is not None:
        assert span is None or span.is_whole, "refused by assembly/support.py"
        return lambda: build_own(name, held, dtype, nnx.Rngs(seed), rows)
    return lambda: Decoder(
        held, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed), vocab_rows=rows, span=span, mesh=mesh
    )


def abstract_decoder(
    config: ModelConfig, dtype: DType, mesh: Mesh | AbstractMesh, span: LayerSpan | None = None
) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """The structure of the decoder or of one stage, and a tree with a sharded shape in place of each parameter.

    Raises:
        ConfigError: the model cannot be split evenly over the mesh.
    """
    assert not uneven_parts(config, tensor_parallel_size(mesh)), "refused by assembly/support.py"
    structure, state = nnx.split(nnx.eval_shape(decoder_builder(config, dtype, mesh, span=span)))
    shapes: nnx.State = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        param_shardings(state, mesh),
    )
    return structure, shapes


def random_decoder(
    config: ModelConfig, *, dtype: DType, mesh: Mesh, seed: int = 0, span: LayerSpan | None = None
) -> Decoder:
    """A decoder or one stage with random weights, created shard by shard.

    Values depend neither on the mesh, except for padding, nor on the stages.

    Raises:
        ConfigError: the model cannot be split evenly over the mesh.
    """
    _, shapes = abstract_decoder(config, dtype, mesh, span)
    build = decoder_builder(config, dtype, mesh, seed, span)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    create = jax.jit(lambda: nnx.state(build()), out_shardings=shardings)
    structure, _ = nnx.split(nnx.eval_shape(build))
    decoder: Decoder = nnx.merge(structure, create())
    return decoder


@dataclass(frozen=True)
class Loading:
    """A model that can be loaded: its shapes are known before its weights are read.

    Attributes:
        config: the configuration of the model, with the files' value of `tied_embeddings` if they contradict it.
        dtype: the type of the parameters.
        keep_bits: gives matrices the form of the files' own bits; see `matrices.stored.keep_bits`. None: there is none.
        packs: files are read into packed matrices, so `arrange` may pack the decoder.
    """

    config: ModelConfig
    dtype: DType
    _read: Callable[[ModelConfig, Wanted, Progress], nnx.State] | None  # None: random weights
    _seed: int
    keep_bits: KeepBits | None = None
    packs: bool = False

    @property
    def is_random(self) -> bool:
        """True if the weights are drawn. Then a parameter of all layers exists as a whole until it is unstacked."""
        return self._read is None

    def shapes(self, mesh: Mesh, span: LayerSpan | None = None) -> Decoder:
        """The decoder with a sharded shape in place of each parameter. Raises ConfigError as `load` does."""
        decoder: Decoder = nnx.merge(*abstract_decoder(self.config, self.dtype, mesh, span))
        return decoder

    def of_model(self, mesh: Mesh) -> nnx.State:
        """A sharded shape for each parameter of all layers, stacked."""
        return abstract_decoder(self.config, self.dtype, mesh)[1]

    def load(
        self,
        mesh: Mesh,
        progress: Progress = lambda loaded, total: None,
        span: LayerSpan | None = None,
        arrange: Callable[[Decoder], None] = lambda decoder: None,
    ) -> Decoder:
        """Read the weights, or those of one stage. Raises ConfigError and CheckpointError, as `load_decoder` does.

        Args:
            mesh: devices of the stage.
            progress: called after each parameter.
            span: layers of the stage; None for all.
            arrange: changes the form of the layers, by `Decoder.unstack`. Files are read directly into this form.
        """
        if self._read is None:
            decoder = random_decoder(
                self.config, dtype=self.dtype, mesh=mesh, seed=self._seed, span=span
            )
            arrange(decoder)
            return decoder
        span = span or whole(self.config)
        kind = self.config.quantization
        structure, held, held_of_model = self._forms(self.config, mesh, span, arrange)
        shapes = held
        of_model = held_of_model
        if kind is not None:
            _, shapes, of_model = self._forms(
                replace(self.config, quantization=None), mesh, span, arrange
            )
        wanted = Wanted(shapes, of_model, range(span.start, span.stop), kind, held, held_of_model)
        config = on_shards(self.config, tensor_parallel_size(mesh))
        read: Decoder = nnx.merge(structure, self._read(config, wanted, progress))
        return read

    def _forms(
        self, config: ModelConfig, mesh: Mesh, span: LayerSpan, arrange: Callable[[Decoder], None]
    ) -> tuple[nnx.GraphDef[Decoder], nnx.State, nnx.State]:
        """The structure and the shapes of a stage, in the form of `arrange`, and the shapes of the model."""
        structure, shapes = abstract_decoder(config, self.dtype, mesh, span)
        of_model = shapes if span.is_whole else abstract_decoder(config, self.dtype, mesh)[1]
        decoder: Decoder = nnx.merge(structure, shapes)
        arrange(decoder)
        return *nnx.split(decoder), of_model


def prepare_load(
    source: str | Path,
    *,
    dtype: DType,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    config: ModelConfig | None = None,
) -> Loading:
    """Find the weights of a model, without reading them. The arguments are those of `load_decoder`.

    Raises:
        ConfigError: the source, its configuration or the format is wrong.
        CheckpointError: the files cannot be found or opened.
    """
    config = config or read_model_config(source)
    if load_format == "dummy" or (is_preset(str(source)) and load_format == "auto"):
        return Loading(config, dtype, None, seed)
    check_weights(source, load_format)
    directory = Path(source)
    if is_gguf(str(source)):
        file = GgufFile.open(directory)
        packs = config.quantization is None
        keep = file.keep_bits if packs and file.has_few_bits() else None
        return Loading(config, dtype, file.load, seed, keep, packs)
    if load_format == "orbax" or (load_format == "auto" and _has_orbax(directory)):
        return Loading(config, dtype, partial(load_orbax, directory), seed)
    if config.decoder is not None:
        message = (
            f"{directory} has safetensors, and a decoder of your own reads Orbax checkpoints; save its state with "
            f"orbax.checkpoint to {PARAMS}/ (docs/own_models.md)"
        )
        raise ConfigError(message, param="decoder")
    packs = config.quantization is None
    folder = SafetensorsFolder(directory)
    config = with_true_head(folder, config, dtype)
    if config.stored is None and not (packs and has_mxfp4(folder, config)):
        return Loading(config, dtype, partial(load_safetensors, folder), seed, packs=packs)
    keep = partial(keep_published, folder) if packs else None
    return Loading(config, dtype, partial(load_published, folder), seed, keep, packs)


def load_decoder(
    source: str | Path,
    *,
    dtype: DType,
    mesh: Mesh,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda loaded, total: None,
    config: ModelConfig | None = None,
) -> Decoder:
    """Load the model `source`, with its parameters on `mesh`.

    Args:
        source: a model directory, a GGUF file, or "preset:<name>" with random weights.
        dtype: type of the parameters, independent of the type in the file.
        mesh: a mesh with the axis "tensor"; see `tensor_mesh`.
        load_format: "auto" takes Orbax if there is a params/ folder, else safetensors, else Orbax in the directory
            itself; "dummy" draws random weights.
        seed: seed of random weights.
        progress: called after each parameter that was read.
        config: the configuration of `source`, if the caller has read it already. If the files contradict its
            `tied_embeddings`, the decoder's configuration has the value of the files.

    Raises:
        ConfigError: the source, its configuration or the format is wrong, or the model cannot be split over the mesh.
        CheckpointError: the weights do not fit the configuration. The error lists all problems.
    """
    return prepare_load(
        source, dtype=dtype, load_format=load_format, seed=seed, config=config
    ).load(mesh, progress)


def _has_orbax(directory: Path) -> bool:
    """True if "auto" takes Orbax: there is params/, or no safetensors and another Orbax checkpoint."""
    if not has_safetensors(directory):
        return orbax_root(directory) is not None
    if (directory / PARAMS).is_dir():
        logger.info(
            "%s has %s/ and safetensors: %s/ is served; load_format safetensors changes that",
            directory,
            PARAMS,
            PARAMS,
        )
    return (directory / PARAMS).is_dir()
