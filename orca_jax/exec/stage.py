"""One pipeline stage on its mesh: weights, compiled programs and state; and the hop to the next stage."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from orca_jax.exec.layers import flatten_module
from orca_jax.exec.programs import DeviceState, ProgramName, Programs
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.programs import Drawn, pack_masks
from orca_jax.exec.states import PoolArrays
from orca_jax.model.transformer import Decoder
from orca_jax.values.startup import StartTimes
from orca_jax.values.step import BlockCopy

type Vector = NDArray[np.int32]
"""A host array. Passing it to a program takes a tenth of the time of a `jax.device_put` before it."""


class StageModel(NamedTuple):
    """The layers of a stage, and the devices that share them. A model in one stage has one of these."""

    decoder: Decoder | None  # None: this process has none of the devices
    mesh: Mesh


@runtime_checkable
class Hop(Protocol):
    """Starts a copy of hidden vectors to the devices of the next stage, without waiting for it."""

    def __call__(self, bucket: int, hidden: jax.Array | None) -> jax.Array | None:
        """Copy `[bucket, E]`. The argument must not be used afterwards.

        In a process without devices of one stage, the argument or the result is None.
        """
        ...


def make_hop(source: Mesh, target: Mesh, stream_dim: int, buckets: Sequence[int]) -> Hop | None:
    """The hop between two stages; None if this process has no devices of both. Compiles programs if it must."""
    devices = chain(source.devices.flat, target.devices.flat)
    processes = {device.process_index for device in devices}
    own = source.devices.flat[0].client.process_index()
    if processes == {own}:
        return LocalHop(target)
    if own in processes:
        return RemoteHop(source, target, stream_dim, buckets)
    return None


class LocalHop:
    """A hop within one process.

    Args:
        target: mesh of the next stage.
    """

    def __init__(self, target: Mesh) -> None:
        self._sharding = NamedSharding(target, PartitionSpec())

    def __call__(self, bucket: int, hidden: jax.Array | None) -> jax.Array | None:
        """Copy to the devices of the next stage."""
        return jax.device_put(hidden, self._sharding, donate=True)


class RemoteHop:
    """A hop between processes: a program of nothing but `ppermute` on the devices of both stages.

    On a CPU `jax.device_put` between processes needs its own sockets, and hung after some hops. All processes of
    both stages must start the same hops in the same order. Device i of one stage sends to device i of the next one.

    Args:
        source: mesh of a stage.
        target: mesh of the next stage, of the same size.
        stream_dim: E, the numbers of a token between stages.
        buckets: numbers of tokens.
    """

    def __init__(self, source: Mesh, target: Mesh, stream_dim: int, buckets: Sequence[int]) -> None:
        both = Mesh(np.stack([source.devices, target.devices]), ("stage", *source.axis_names))
        self._sharding = NamedSharding(both, PartitionSpec("stage"))
        self._target = NamedSharding(target, PartitionSpec())
        self._receivers = set(self._target.addressable_devices)
        self._stream_dim = stream_dim
        move = jax.shard_map(
            lambda hidden: jax.lax.ppermute(hidden, "stage", [(0, 1)]),
            mesh=both,
            in_specs=PartitionSpec("stage"),
            out_specs=PartitionSpec("stage"),
            check_vma=False,
        )
        self._programs = {
            bucket: jax.jit(move).lower(self._shape(bucket)).compile() for bucket in buckets
        }
        self._blank = {bucket: self._zeros(bucket) for bucket in buckets}

    def __call__(self, bucket: int, hidden: jax.Array | None) -> jax.Array | None:
        """Send, receive, or both."""
        shape = self._shape(bucket)
        parts = self._blank[bucket]
        if hidden is not None:
            parts = [shard.data for shard in hidden.addressable_shards] + parts
        moved = self._programs[bucket](
            jax.make_array_from_single_device_arrays(
                shape.shape, self._sharding, parts, dtype=shape.dtype
            )
        )
        if not self._receivers:
            return None
        received = [
            shard.data for shard in moved.addressable_shards if shard.device in self._receivers
        ]
        return jax.make_array_from_single_device_arrays(
            (bucket, self._stream_dim), self._target, received, dtype=shape.dtype
        )

    def _zeros(self, bucket: int) -> list[jax.Array]:
        zeros = np.zeros((bucket, self._stream_dim), np.float32)
        return [jax.device_put(zeros, device) for device in self._receivers]

    def _shape(self, bucket: int) -> jax.ShapeDtypeStruct:
        """Both halves of the transfer, that of the receiving stage second."""
        return jax.ShapeDtypeStruct(
            (2 * bucket, self._stream_dim), np.float32, sharding=self._sharding
        )


class HeldArray(NamedTuple):
    """An array in the memory of the host: the parts of this process, by their places."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: Mapping[tuple[slice, ...], NDArray[Any]]

    def restore(self) -> jax.Array:
        """The array on its devices."""

        def part(place: tuple[slice, ...] | None) -> NDArray[Any]:
            assert place is not None, "each part has a place"
            return self.parts[place]

        return jax.make_array_from_callback(self.shape, self.sharding, part)


def hold(array: jax.Array) -> HeldArray:
    """Copy an array to the memory of the host."""
    parts: dict[tuple[slice, ...], NDArray[Any]] = {}
    for shard in array.addressable_shards:
        if shard.index not in parts:
            parts[shard.index] = np.array(shard.data)
    return HeldArray(array.shape, array.sharding, parts)


class Stage:
    """Runs the programs of a stage, without waiting for its devices.

    Args:
        decoder: parameters on the devices.
        shapes: the shapes of the programs.
        programs: compiled.

    Attributes:
        state: donated from program to program.
    """

    def __init__(
        self, decoder: Decoder, shapes: Programs, programs: dict[ProgramName, jax.stages.Compiled]
    ) -> None:
        self.shapes = shapes
        self.programs = programs
        self.state: DeviceState = shapes.allocate_state()
        self._weights = flatten_module(decoder)[1]
        self._unembedding: list[jax.Array] = []
        self._adapters: dict[str, jax.Array] = {}
        self._no_masks: dict[int, jax.Array] = {}
        self._held: list[HeldArray | None] = []  # on the host, while the weights sleep
        if shapes.adapted_layouts:
            self._adapters = shapes.allocate_stacks()
        if shapes.is_last:
            self._unembedding = flatten_module(decoder.unembedding)[1]
            for width in shapes.full_widths:
                mask = pack_masks((), width, shapes.num_columns)
                self._no_masks[width] = shapes.replicate(mask)

    def has_layers(self, bucket: int) -> bool:
        """True if the layers of a bucket are compiled."""
        return ("layers", bucket) in self.programs

    def compile_later(self, times: StartTimes) -> None:
        """Compile the programs that the start has left out so far."""
        self.programs |= self.shapes.compile(lambda done, total: None, times, later=True)

    def run_layers(
        self, bucket: int, vector: Vector, hidden: jax.Array | None, *, is_adapted: bool = False
    ) -> jax.Array:
        """Start the layers on one launch. `hidden` is the result of the stage before, or None in the first one.

        `is_adapted` holds for a vector with slots of adapters.
        """
        state = self.state
        program = self.programs["layers", bucket]
        weights = self._weights
        if is_adapted:
            program = self.programs["adapted", bucket]
            weights = self._with_adapters()
        inputs = state.last_token if hidden is None else hidden
        caches, history, result = program(weights, state.caches, state.history, inputs, vector)
        self.state = DeviceState(caches, history, state.last_token)
        out: jax.Array = result
        return out

    def draw(self, kind: Kind, width: int, hidden: jax.Array, draws: Vector) -> Drawn:
        """Start a plain sampler of the last stage."""
        return self._keep(
            self.programs[kind, width](self._unembedding, self.state.last_token, hidden, draws)
        )

    def draw_full(
        self, width: int, hidden: jax.Array, draws: Vector, extras: Vector, masks: Vector | None
    ) -> Drawn:
        """Start a full sampler of the last stage."""
        state = self.state
        plain = self._unembedding, state.last_token, hidden, draws
        mask = self._no_masks[width] if masks is None else masks
        return self._keep(self.programs["full", width](*plain, state.history, extras, mask))

    def write_adapter(self, slot: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Start to copy an adapter into a slot. `values` are those of all layers of the model."""
        span = self.shapes.span
        own = dict(values)
        for name, each in values.items():
            if each.ndim > 1:
                own[name] = each[span.start : span.stop]
        self._adapters = self.programs["write_slot", 0](
            self._adapters, np.array([slot], np.int32), own
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Start to copy blocks of pages, after the launches submitted so far. No target is a source."""
        caches = self.state.caches
        pages = list(caches.pages)
        for pool in range(len(pages)):
            pairs = [
                (each.source, each.target)
                for each in copies
                if self.shapes.groups[each.group].pool == pool
            ]
            width = self.shapes.num_copies(pool)
            for first in range(0, len(pairs), width):
                part = pairs[first : first + width]
                part += part[-1:] * (width - len(part))  # the same copy again changes nothing
                pages[pool] = self.programs["copy_blocks", pool](
                    pages[pool], np.array(part, np.int32)
                )
        self.state = self.state._replace(caches=caches._replace(pages=tuple(pages)))

    def read_block(self, pool: int, block: int) -> PoolArrays:
        """Start to read a block of a pool, after the launches submitted so far."""
        arrays = self.state.caches.pools[pool]
        number = np.array([block], np.int32)
        found: PoolArrays = self.programs["read_blocks", pool](arrays, number)
        return found

    def write_block(self, pool: int, block: int, values: Any) -> None:
        """Start to replace a block of a pool by values in the form of `read_block`."""
        caches = self.state.caches
        number = np.array([block], np.int32)
        arrays = self.programs["write_blocks", pool](caches.pools[pool], number, values)
        self.state = self.state._replace(caches=caches.with_pool(pool, arrays))

    def put_weight(self, index: int, value: jax.Array) -> None:
        """Replace parameter `index` of the flat weights, and free the old one. No program may be running."""
        old = self._weights[index]
        shape = self.shapes.weights[index]
        assert (value.shape, value.dtype, value.sharding) == (
            shape.shape,
            shape.dtype,
            shape.sharding,
        ), "another shape"
        self._held = []  # they are of other weights
        self._weights[index] = value
        self._unembedding = [value if each is old else each for each in self._unembedding]

    def free_pages(self) -> None:
        """Free pages, states and the tokens of all rows."""
        for array in jax.tree.leaves(self.state):
            array.delete()

    def allocate_pages(self) -> None:
        """Allocate empty ones again."""
        self.state = self.shapes.allocate_state()

    def free_weights(self, *, keeps: bool) -> None:
        """Free the weights on the devices. With `keeps`, the memory of the host has them until `restore_weights`."""
        self._held = [hold(array) if keeps else None for array in self._weights]
        for array in self._weights:
            array.delete()

    def restore_weights(self) -> None:
        """Put the weights of the host back."""
        held = self._held
        self._held = []
        for index, each in enumerate(held):
            assert each is not None, "the weights were not kept"
            self.put_weight(index, each.restore())

    def close(self) -> None:
        """Free the arrays, but not the weights."""
        for array in (*jax.tree.leaves((self.state, self._adapters)), *self._no_masks.values()):
            array.delete()
        self.programs = {}

    def _with_adapters(self) -> list[jax.Array]:
        return [*self._weights, *(self._adapters[name] for name in self.shapes.stack_names)]

    def _keep(self, result: Any) -> Drawn:
        last_token, drawn = result
        self.state = self.state._replace(last_token=last_token)
        out: Drawn = drawn
        return out


def make_path(
    models: Sequence[StageModel], own: Sequence[Stage], stream_dim: int, buckets: Sequence[int]
) -> list[tuple[Hop | None, Stage | None]]:
    """The way of a launch: for each stage of the model the hop to it, and the stage itself if it is of this process.

    Args:
        models: all stages, in their order.
        own: those of this process.
        stream_dim: E, the numbers of a token between stages.
        buckets: numbers of tokens.
    """
    stages = iter(own)
    path = list[tuple[Hop | None, Stage | None]]()
    hop: Hop | None = None
    for index, (decoder, mesh) in enumerate(models):
        if index:
            hop = make_hop(models[index - 1].mesh, mesh, stream_dim, buckets)
        path.append((hop, None if decoder is None else next(stages)))
    return path
