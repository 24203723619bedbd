"""The decoder: one Transformer. Its configuration alone makes it a model of a family.

There are four ways of running the layers: a scan, two loops, or one after the other. Layers with the same mixer share
one compiled body: windows and rotary positions are values. With several mixers the body is one period of their
pattern. A pattern that does not repeat is a single period, so its layers are unrolled.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.kernels.native import LayerRows, Library
from orca_jax.model.block import AttentionOnly, Block, Pattern, carried_stream
from orca_jax.model.experts import Experts, MlpAndExperts
from orca_jax.model.layer_inputs import InputsOfLayers
from orca_jax.model.layers import Linear, Norm, Table, kept, scaled
from orca_jax.model.lora.launch import Adapters, LayerAdapters
from orca_jax.model.maker import Maker, Storage, optional
from orca_jax.model.matrices.layout import layer_of
from orca_jax.model.mixers.base import Attend, Index, Inputs, Mixed, Mixer, Mixing
from orca_jax.model.rope import Rotation, Rotations
from orca_jax.model.sharding import tensor_parallel_size
from orca_jax.model.stages import LayerSpan, of_span, whole
from orca_jax.values.config import ModelConfig


class Decoder(nnx.Module):
    """Token ids in, hidden vectors out, for the merged tokens of an iteration; or one stage of this.

    Parameters are created here with random values, for training and benchmarks. `load.load_decoder` creates the same
    tree sharded, or fills it from a checkpoint. It never holds all values on one device.

    Args:
        config: the model.
        dtype: type of the parameters.
        rngs: source of the random values.
        vocab_rows: rows of the embedding table, at least `config.vocab_size`; padding rows are zeros.
        span: the layers of this stage; None for all. A stage has only the tables that it reads.
        mesh: the devices; None: one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        vocab_rows: int,
        span: LayerSpan | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        self.config = config
        self.span = span = span or whole(config)
        self.num_layers = span.size
        self.of_stage = of_span(config, span)
        self.pattern = Pattern(tuple(kind.parts for kind in self.of_stage.layers))
        self.is_first = span.is_first
        shards = 1 if mesh is None else tensor_parallel_size(mesh)
        make = Maker(dtype, rngs, mesh=mesh, storage=Storage(config.quantization, shards))
        tied = config.tied_embeddings

        def vocabulary(is_read: bool, bias: bool = False) -> Table | None:
            if not is_read:
                make.skip()
                return None
            return Table(
                make,
                vocab_rows,
                config.embed_dim,
                "vocab",
                used=config.vocab_size,
                soft_cap=config.logit_soft_cap,
                scale=config.logit_scale,
                bias=bias,
            )

        self.embedding = nnx.data(vocabulary(span.is_first or (tied and span.is_last)))
        self.positions: Table | None = nnx.data(None)
        if config.learned_positions and span.is_first:
            self.positions = nnx.data(
                Table(make, config.max_positions, config.embed_dim, "positions")
            )
        elif config.learned_positions:
            make.skip()
        self.layer_inputs: InputsOfLayers | None = nnx.data(None)
        if config.layer_inputs is not None:
            self.layer_inputs = nnx.data(InputsOfLayers(make, config, config.layer_inputs))
        has_norm = config.embedding_norm and span.is_first
        self.embedding_norm = optional(has_norm, Norm, make, config)
        self.embedding_scale = float(np.float32(config.embedding_scale).astype(dtype))
        self.blocks: Block | nnx.List[Block] = Block(make.stacked(span), config)
        self.is_switched = self.is_packed = False
        self.final_norm = optional(span.is_last, Norm, make, config)
        self.head = optional(not tied, vocabulary, span.is_last, config.head_bias)

    def __call__[Cache](
        self,
        inputs: Int[Array, "T"] | Float[Array, "T S"],
        positions: Int[Array, "T"],
        attend: Attend[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
        adapters: Adapters | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run all layers of a model with attention in each of them; see `run_layers`.

        Args:
            inputs: the vectors of `run_layers`, which also explains `positions`, `cache`, `keep` and `adapters`.
            attend: attention of one layer, by its index in the stage; defines the meaning of `cache`.
        """
        return self.run_layers(inputs, positions, AttentionOnly(attend), cache, keep, adapters)

    def run_layers[Cache](
        self,
        inputs: Int[Array, "T"] | Float[Array, "T S"],
        positions: Int[Array, "T"],
        mixing: Mixing[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
        adapters: Adapters | None = None,
        num_tokens: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run all layers of this stage over T tokens of any mix of requests.

        Args:
            inputs: token ids, below the vocabulary's size; or the result of the stage before.
            positions: position of each token in its own request, below `config.max_positions`.
            mixing: access of each layer, by its index in the stage, to `cache`; defines the meaning of it.
            cache: any tree of arrays. It is a flat carry of the scan over layers, never sliced by layer, because
                only then does XLA update it in place.
            keep: tokens to return hidden vectors of, T at most; None for all. Unless layers are scanned, the last one
                skips the others after its mixer: only the last token of a prompt is sampled from.
            adapters: additions to linear layers, by token; None for none.
            num_tokens: the tokens before padding; None for T. The library multiplies no others.

        Returns:
            Hidden vectors, after the final norm in the last stage, and the cache.
        """
        x = self._embed(inputs, positions) if self.is_first else inputs
        beside = None
        if self.layer_inputs is not None:
            beside = self.layer_inputs(inputs, x)
        ropes = [kind.rope for kind in self.of_stage.layers]
        rotation_of: Callable[[Index], Rotation | None] = _no_rotation
        if any(ropes):
            rotation_of = Rotations(ropes, self.config.head_dim, positions).of_layer
        launch = LayersRun(rotation_of, mixing, keep, adapters, beside)
        pattern = self.pattern
        if isinstance(self.blocks, Block) and self.is_packed:
            layers = packed_layers(
                self.blocks, pattern, len(x) if num_tokens is None else num_tokens
            )
            x, cache = looped(layers, pattern, x, launch, cache)
        elif isinstance(self.blocks, Block):
            x, cache = scanned(self.blocks, pattern, x, launch, cache)
            x = kept(x, keep)
        elif self.is_switched and pattern.repeats:
            x, cache = looped(switched_layers(self.blocks, pattern), pattern, x, launch, cache)
        else:
            x, cache = unrolled(self.blocks, x, launch, cache)
        if self.final_norm is not None:
            x = self.final_norm(x[:, : self.config.embed_dim])
        return x, cache

    def _embed(self, ids: Int[Array, "T"], positions: Int[Array, "T"]) -> Float[Array, "T E"]:
        assert self.embedding is not None, "the first stage has the embedding"
        x = scaled(self.embedding(ids), self.embedding_scale)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.config.residual == "carried":
            return carried_stream(x)
        if self.positions is None:
            return x
        return x + self.positions(positions)

    def unstack(self, *, switched: bool = False) -> None:
        """Replace the stacked parameters by separate arrays for each layer, or stacked shapes by separate shapes.

        The layers are then unrolled, or if `switched`, run in a loop with a switch between their weights. On a CPU and
        a GPU, a scan copies the weights of every layer out of the stack in each iteration. A TPU reads it in place.
        """
        assert isinstance(self.blocks, Block), "the decoder is unstacked already"
        self.is_switched = switched
        structure, stacked = nnx.split(self.blocks)
        kinds = self.pattern.parts
        of_kind: dict[tuple[str, ...], Any] = dict.fromkeys(kinds, structure)
        if len(of_kind) > 1:
            of_kind = {parts: nnx.split(self.blocks.with_parts(parts))[0] for parts in kinds}
        waiting = list(nnx.to_flat_state(stacked))
        self.blocks = nnx.List([])
        del stacked  # so that each stack is freed as soon as its slices are there
        if not isinstance(waiting[0][1].get_value(), jax.ShapeDtypeStruct):
            gc.collect()  # the block before is in a cycle, and would keep all stacks
        layers: list[list[Any]] = [[] for _ in range(self.num_layers)]
        while waiting:
            path, variable = waiting.pop()
            stack = variable.get_value()
            axes = variable.get_metadata("axes")
            for index, layer in enumerate(self.pattern.layers_of(path)):
                layers[layer].append(
                    (path, variable.replace(_layer_of(stack, index), axes=axes[1:]))
                )
        self.blocks = nnx.List(
            [
                nnx.merge(of_kind[parts], nnx.from_flat_state(layer))
                for parts, layer in zip(kinds, layers, strict=True)
            ]
        )

    @property
    def is_stacked(self) -> bool:
        """True if each parameter of the layers is one array for all of them."""
        return isinstance(self.blocks, Block)

    def can_pack(self, library: Library) -> bool:
        """True if the layers are stacked and have the same mixer, and all their matrices have a packed form."""
        if (
            not isinstance(self.blocks, Block)
            or len(self.blocks.mixers) > 1
            or len(self.blocks.mlps) != 1
        ):
            return False
        if isinstance(self.blocks.mlp, MlpAndExperts):
            return False
        layers: list[Linear | Experts] = [*self.blocks.linear_layers, *self.blocks.experts]
        return all([layer.has_packed_form(library) for layer in layers])

    def pack(self, library: Library, num_devices: int) -> None:
        """Pack the matrices of all layers, or their shapes; see `packed_matrix` and `packed_table`.

        Stacked layers are then run in a loop with one compiled body. They must be unstacked unless `can_pack`.
        """
        if self.span.is_last:
            self.unembedding.pack(library, num_devices)
        self.is_packed = self.is_stacked
        assert not self.is_packed or self.can_pack(library), (
            "some stacked matrices have no packed form"
        )
        for block in [self.blocks] if isinstance(self.blocks, Block) else self.blocks:
            for layer in block.linear_layers:
                layer.pack(library, num_devices)
            for experts in block.experts:
                experts.pack(library, num_devices)

    @property
    def unembedding(self) -> Table:
        """The table with the logits as its `scores`. Those at and after `config.vocab_size` are padding."""
        table = self.head or self.embedding
        assert table is not None, "the last stage has the unembedding"
        return table

    def unembed(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Logits of hidden vectors."""
        return self.unembedding.scores(hidden)


def _no_rotation(layer: Index) -> None:
    """The rotation of layers with learned positions, or without any."""


def _layer_of(
    stack: jax.Array | jax.ShapeDtypeStruct, index: int
) -> jax.Array | jax.ShapeDtypeStruct:
    """One layer of stacked values, or its shape."""
    if isinstance(stack, jax.Array):
        return stack[index]
    assert isinstance(stack.sharding, NamedSharding)
    sharding = NamedSharding(stack.sharding.mesh, PartitionSpec(*stack.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


class LayersRun[Cache]:
    """The arguments of a run that all layers share.

    Args:
        rotation_of: the rotation of a layer, by its index in the stage.
        mixing: access to the cache.
        keep: the tokens for the part of the last layer after its mixer; None for all.
        adapters: additions to linear layers.
        beside: inputs of each layer beside the stream; None if it has none.
    """

    def __init__(
        self,
        rotation_of: Callable[[Index], Rotation | None],
        mixing: Mixing[Cache],
        keep: Int[Array, "B"] | None,
        adapters: Adapters | None,
        beside: Float[Array, "L T P"] | None,
    ) -> None:
        self.rotation_of = rotation_of
        self.mixing = mixing
        self.keep = keep
        self.adapters = adapters
        self._beside = beside

    def beside(self, layer: Index) -> Float[Array, "T P"] | None:
        """The inputs of a layer beside the stream."""
        if self._beside is None:
            return None
        return self._beside[layer]

    def added(self, layer: Index) -> LayerAdapters | None:
        """The adapters of a layer."""
        if self.adapters is None:
            return None
        return self.adapters.of_layer(layer)


def unrolled[Cache](
    blocks: Sequence[Block], x: Float[Array, "T E"], launch: LayersRun[Cache], cache: Cache
) -> tuple[Float[Array, "B E"], Cache]:
    """Run one layer after the other."""
    last = len(blocks) - 1
    for index, block in enumerate(blocks):
        keep = launch.keep if index == last else None
        options = keep, launch.added(index), launch.beside(index)
        x, cache = block(x, launch.rotation_of(index), index, launch.mixing, cache, *options)
    return x, cache


def scanned[Cache](
    stack: Block, pattern: Pattern, x: Float[Array, "T E"], launch: LayersRun[Cache], cache: Cache
) -> tuple[Float[Array, "T E"], Cache]:
    """Run all layers with one compiled body. The last one runs on all tokens, whatever is kept."""
    size = pattern.period
    structure, state = nnx.split(stack)

    def by_period(stacked: Array) -> Array:
        if size == 1:
            return stacked
        return stacked.reshape(pattern.num_periods, -1, *stacked.shape[1:])

    def period(
        carry: tuple[Array, Cache], inputs: tuple[Array, nnx.State]
    ) -> tuple[tuple[Array, Cache], None]:
        x, cache = carry
        first, parameters = inputs
        blocks: Block = nnx.merge(structure, parameters)
        for step in range(size):
            index = first + step if step else first
            block = _layer_of_period(blocks, pattern, step)
            options = None, launch.added(index), launch.beside(index)
            x, cache = block(x, launch.rotation_of(index), index, launch.mixing, cache, *options)
        return (x, cache), None

    first = jnp.arange(pattern.num_periods, dtype=jnp.int32)
    if size > 1:
        first = size * first
    (x, cache), _ = jax.lax.scan(period, (x, cache), (first, jax.tree.map(by_period, state)))
    return x, cache


def _layer_of_period(blocks: Block, pattern: Pattern, step: int) -> Block:
    """One layer of a period, whose layers are stacked if there are several."""
    if pattern.period == 1:
        return blocks
    structure, state = nnx.split(blocks.with_parts(pattern.parts[step]))
    flat = [
        (path, variable.replace(variable.get_value()[pattern.layers_of(path).index(step)]))
        for path, variable in nnx.to_flat_state(state)
    ]
    block: Block = nnx.merge(structure, nnx.from_flat_state(flat))
    return block


type Between = Callable[[Index, Array, Inputs, Mixed], tuple[Array, Inputs]]
"""The parts after the mixer of a layer and before that of the next one. The first argument is the period."""


class LoopLayers(NamedTuple):
    """The layers of a loop over periods, and a call that runs a function on the current period."""

    block_of: Callable[[Index], Block]
    # by the layer's place in the period; without parameters of its own
    mixer_of: Callable[[int], Mixer]
    call: Callable[[Between, Int[Array, ""], Array, Inputs, Mixed], tuple[Array, Inputs]]
    """Calls the function with the arguments after it. The number of the last period is an integer."""


def switched_layers(blocks: Sequence[Block], pattern: Pattern) -> LoopLayers:
    """Layers with their own weights, which a switch selects.

    XLA compiles each layer of an unrolled program anew, and most of this is attention with its loops. In this form 12
    layers compile in a quarter of the time. The results are the same bits, in the same time, on a CPU: there a branch
    costs nothing and copies no weights. A GPU would wait for its host at each branch.
    """

    def call(between: Between, period: Int[Array, ""], *args: Any) -> tuple[Array, Inputs]:
        branches = [partial(between, each) for each in range(pattern.num_periods)]
        return jax.lax.switch(period, branches, *args)

    return LoopLayers(lambda index: blocks[index], lambda step: blocks[step].mixer, call)  # type: ignore[index]


def packed_layers(stack: Block, pattern: Pattern, num_tokens: int | Int[Array, ""]) -> LoopLayers:
    """Layers with packed matrices in stacks, all with the same mixer. All but the last share one compiled body.

    The products are those of the first `num_tokens` tokens.
    """
    structure, state = nnx.split(stack)
    parameters = nnx.to_flat_state(state)
    last = pattern.num_periods - 1

    def block_of(index: Index) -> Block:
        place = LayerRows(jnp.int32(index), jnp.int32(num_tokens))
        of_layer = [(path, layer_of(variable, place)) for path, variable in parameters]
        return nnx.merge(structure, nnx.from_flat_state(of_layer))

    def call(between: Between, period: Int[Array, ""], *args: Any) -> tuple[Array, Inputs]:
        return jax.lax.cond(period < last, partial(between, period), partial(between, last), *args)

    return LoopLayers(block_of, lambda step: stack.mixer, call)


def looped[Cache](
    layers: LoopLayers,
    pattern: Pattern,
    x: Float[Array, "T E"],
    launch: LayersRun[Cache],
    cache: Cache,
) -> tuple[Float[Array, "B E"], Cache]:
    """Run all layers in a loop with one compiled `mix` for each layer of a period."""
    size = pattern.period
    last = len(pattern.parts) - 1
    keep = launch.keep

    def layer_at(period: Index, step: int) -> Index:
        if size == 1:
            return period
        return period * size + step

    def between(
        step: int, period: Index, x: Float[Array, "T E"], first: Inputs, out: Mixed
    ) -> tuple[Float[Array, "T E"], Inputs]:
        layer = layer_at(period, step)
        if isinstance(layer, int) and layer == last:
            kept = layers.block_of(last).finish(
                x, out, keep, launch.added(last), launch.beside(last)
            )
            # The loop ends here, and its carry needs inputs of the first layer of a period: these are not read.
            return jnp.pad(kept, ((0, x.shape[0] - kept.shape[0]), (0, 0))), first
        x = layers.block_of(layer).finish(x, out, None, launch.added(layer), launch.beside(layer))
        return x, layers.block_of(layer + 1).project(
            x, launch.rotation_of(layer + 1), launch.added(layer + 1)
        )

    def run_period(
        period: Int[Array, ""], carry: tuple[Array, Inputs, Cache]
    ) -> tuple[Array, Inputs, Cache]:
        x, inputs, cache = carry
        first = inputs
        for step in range(size):
            out, cache = layers.mixer_of(step).mix(
                inputs, layer_at(period, step), launch.mixing, cache
            )
            x, inputs = layers.call(partial(between, step), period, x, first, out)
        return x, inputs, cache

    inputs = layers.block_of(0).project(x, launch.rotation_of(0), launch.added(0))
    x, _, cache = jax.lax.fori_loop(0, pattern.num_periods, run_period, (x, inputs, cache))
    if keep is not None:
        x = x[: keep.shape[0]]
    return x, cache
