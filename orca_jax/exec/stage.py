"""One pipeline stage on its mesh: weights, compiled programs and state; and the hop to the next stage."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from orca_jax.exec.layers import flatten_module
from orca_jax.exec.multi_step import ManyDrawn
from orca_jax.exec.programs import DeviceState, ProgramName, Programs
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.pack import pack_masks
from orca_jax.exec.sampling.programs import Drawn
from orca_jax.model.transformer import Decoder

type Vector = NDArray[np.int32]
"""A host array. Passing it to a program takes a tenth of the time of a `jax.device_put` before it."""


class StageModel(NamedTuple):
    """The layers of a stage, and the devices that share them. A model in one stage has one of these."""

    decoder: Decoder
    mesh: Mesh


class Hop(Protocol):
    """Starts a copy to the devices of the next stage, without waiting for it."""

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Return the copy. The argument must not be used afterwards."""
        ...


class LocalHop:
    """A hop within one process. The copy takes 20 to 60 us of the host.

    Args:
        mesh: of the next stage.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Copy to the devices of the next stage."""
        return jax.device_put(hidden, self._sharding, donate=True)


class Stage:
    """Runs the programs of a stage, without waiting for its devices.

    Args:
        decoder: parameters on the devices.
        shapes: of the programs.
        programs: compiled.

    Attributes:
        state: donated from program to program.
    """

    def __init__(self, decoder: Decoder, shapes: Programs, programs: Mapping[ProgramName, jax.stages.Compiled]) -> None:
        self.shapes = shapes
        self.programs = programs
        self.state: DeviceState = shapes.allocate_state()
        self._weights = flatten_module(decoder)[1]
        self._unembedding = flatten_module(decoder.unembedding)[1] if shapes.is_last else []
        widths = shapes.full_widths if shapes.is_last else ()
        self._no_masks = {width: shapes.replicate(pack_masks((), width, shapes.num_columns)) for width in widths}

    def run_layers(self, bucket: int, vector: Vector, hidden: jax.Array | None) -> jax.Array:
        """Start the layers on one launch. `hidden` is the result of the stage before, or None in the first one."""
        state = self.state
        inputs = state.last_token if hidden is None else hidden
        pages, history, result = self.programs["layers", bucket](
            self._weights, state.pages, state.history, inputs, vector
        )
        self.state = DeviceState(pages, history, state.last_token, state.unreported)
        out: jax.Array = result
        return out

    def draw(self, kind: Kind, width: int, hidden: jax.Array, draws: Vector) -> Drawn:
        """Start a plain sampler of the last stage."""
        return self._keep(self.programs[kind, width](self._unembedding, self.state.last_token, hidden, draws))

    def draw_full(self, width: int, hidden: jax.Array, draws: Vector, extras: Vector, masks: Vector | None) -> Drawn:
        """Start a full sampler of the last stage."""
        state = self.state
        mask = self._no_masks[width] if masks is None else masks
        plain = self._unembedding, state.last_token, hidden, draws
        return self._keep(self.programs["full", width](*plain, state.history, extras, mask))

    def run_many(self, bucket: int, vector: Vector, draws: Vector, limits: Vector) -> ManyDrawn:
        """Start a plan of many steps, if the model has one stage."""
        *state, many = self.programs["multi_step", bucket](
            self._weights, self._unembedding, *self.state, vector, draws, limits
        )
        self.state = DeviceState(*state)
        drawn: ManyDrawn = many
        return drawn

    def close(self) -> None:
        """Free the arrays, but not the weights."""
        for array in (*jax.tree.leaves(self.state), *self._no_masks.values()):
            array.delete()
        self.programs = {}

    def _keep(self, result: Any) -> Drawn:
        last_token, drawn = result
        self.state = self.state._replace(last_token=last_token)
        out: Drawn = drawn
        return out
