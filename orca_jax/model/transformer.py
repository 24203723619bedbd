"""The decoder: one Transformer. Its configuration alone makes it a model of a family."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.config import ModelConfig
from orca_jax.kernels.native import Library
from orca_jax.model.attention import Attend, Attention, LayerAttend, Projections
from orca_jax.model.experts import Experts
from orca_jax.model.layers import Linear, Maker, Mlp, Norm, Table
from orca_jax.model.lora.launch import Adapters, LayerAdapters
from orca_jax.model.packed import layer_of
from orca_jax.model.quantise import Storage
from orca_jax.model.rope import Rotation, Rotations
from orca_jax.model.sharding import tensor_parallel_size
from orca_jax.model.stages import LayerSpan, of_span, whole


class Block(nnx.Module):
    """Attention and MLP, each with a norm and added to the residual stream, which stays float32."""

    def __init__(self, make: Maker, config: ModelConfig) -> None:
        self.residual = config.residual
        out_std = 0.02 * (2 * config.num_layers) ** -0.5  # GPT-2: the residual stream sums 2 L such outputs
        self.attention_norm = Norm(make, config)
        self.attention = Attention(make, config, out_std)
        self.mlp_norm = Norm(make, config)
        self.mlp = (
            Mlp(make, config, out_std) if config.experts is None else Experts(make, config, config.experts, out_std)
        )
        has_both = config.residual == "both_norms"
        self.attention_out_norm = nnx.data(Norm(make, config) if has_both else None)
        self.mlp_out_norm = nnx.data(Norm(make, config) if has_both else None)

    def __call__[Cache](
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        attend: LayerAttend[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run one layer on all tokens. If `keep` is given, the part after attention runs only on these tokens."""
        out, cache = attend(*self.project(x, rotation, adapters), cache)
        return self.finish(x, out, keep, adapters), cache

    def project(
        self, x: Float[Array, "T E"], rotation: Rotation | None, adapters: LayerAdapters | None = None
    ) -> Projections:
        """The part before attention: queries, keys and values of every token."""
        inputs = x if self.residual == "post_norm" else self.attention_norm(x)
        return self.attention.project(inputs, rotation, adapters)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers. Those of experts are not among them: they have products of their own."""
        attention, mlp = self.attention, self.mlp
        layers = [attention.query, attention.key, attention.value, attention.out]
        if isinstance(mlp, Mlp):
            layers += filter(None, [mlp.gate, mlp.up, mlp.down])
        return layers

    def finish(
        self,
        x: Float[Array, "T E"],
        out: Float[Array, "T H D"],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """The part after attention, on all tokens or on those in `keep`."""
        if keep is not None and adapters is not None:
            adapters = adapters.kept
        attended = self.attention.merge(out, keep, adapters)
        # Experts have no adapters.
        mlp = self.mlp if adapters is None or isinstance(self.mlp, Experts) else partial(self.mlp, adapters=adapters)
        return _RESIDUALS[self.residual](self, x if keep is None else x[keep], attended, mlp)


def _pre_norm(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[[Array], Array]
) -> Float[Array, "B E"]:
    """Add the attention of normalised inputs, then the MLP of normalised inputs."""
    x = x + attended
    return x + mlp(block.mlp_norm(x))


def _post_norm(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[[Array], Array]
) -> Float[Array, "B E"]:
    """Add the normalised results of attention, then those of the MLP."""
    x = x + block.attention_norm(attended)
    return x + block.mlp_norm(mlp(x))


def _both_norms(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[[Array], Array]
) -> Float[Array, "B E"]:
    """Add the normalised results of attention and of the MLP, each of normalised inputs."""
    assert block.attention_out_norm is not None and block.mlp_out_norm is not None
    x = x + block.attention_out_norm(attended)
    return x + block.mlp_out_norm(mlp(block.mlp_norm(x)))


def _parallel(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[[Array], Array]
) -> Float[Array, "B E"]:
    """Add attention and MLP, both of the same inputs, each with a norm of its own before it."""
    return x + attended + mlp(block.mlp_norm(x))


_RESIDUALS: Mapping[str, Callable[[Block, Array, Array, Callable[[Array], Array]], Array]] = {
    "pre_norm": _pre_norm,
    "post_norm": _post_norm,
    "both_norms": _both_norms,
    "parallel": _parallel,
}
"""The part of a block after attention, by `ModelConfig.residual`."""


type Index = int | Int[Array, ""]

type RotationOf = Callable[[Index], Rotation | None]
"""The rotation of a layer, by its index in the stage."""


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
        self.is_first = span.is_first
        shards = 1 if mesh is None else tensor_parallel_size(mesh)
        make = Maker(dtype, rngs, mesh=mesh, storage=Storage(config.quantization, shards))
        tied = config.tied_embeddings

        def table(rows: int, axis: str, used: int | None, *, is_read: bool) -> Table | None:
            if not is_read:
                make.skip()
                return None
            cap = config.logit_soft_cap if axis == "vocab" else None
            return Table(make, rows, config.embed_dim, axis, used=used, soft_cap=cap)

        used = config.vocab_size
        self.embedding = nnx.data(table(vocab_rows, "vocab", used, is_read=span.is_first or (tied and span.is_last)))
        learned = None if config.rope else table(config.max_positions, "positions", None, is_read=span.is_first)
        self.positions = nnx.data(learned)
        self.embedding_scale = float(np.float32(config.embedding_scale).astype(dtype))
        self.blocks: Block | nnx.List[Block] = Block(make.stacked(span), config)
        self.is_switched = self.is_packed = False
        self.final_norm = nnx.data(Norm(make, config) if span.is_last else None)
        self.head = nnx.data(None if tied else table(vocab_rows, "vocab", used, is_read=span.is_last))

    def __call__[Cache](
        self,
        inputs: Int[Array, "T"] | Float[Array, "T E"],
        positions: Int[Array, "T"],
        attend: Attend[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
        adapters: Adapters | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run all layers of this stage over T tokens of any mix of requests.

        Args:
            inputs: token ids, below the vocabulary's size; or the result of the stage before.
            positions: position of each token in its own request, below `config.max_positions`.
            attend: attention of one layer, by its index in the stage; defines the meaning of `cache`.
            cache: any tree of arrays. It is a flat carry of the scan over layers, never sliced by layer, because
                only then does XLA update it in place.
            keep: tokens to return hidden vectors of, T at most; None for all. Unless layers are scanned, the last one
                skips the others after its attention: only the last token of a prompt is sampled from.
            adapters: additions to linear layers, by token; None for none.

        Returns:
            Hidden vectors, after the final norm in the last stage, and the cache.
        """
        x = self._embed(inputs, positions) if self.is_first else inputs
        ropes = [kind.rope for kind in self.of_stage.layer_kinds if kind.rope is not None]
        rotation_of = Rotations(ropes, self.config.head_dim, positions).of_layer if ropes else _no_rotation
        if isinstance(self.blocks, Block) and self.is_packed:
            layers = _packed_layers(self.blocks, self.num_layers)
            x, cache = _loop(layers, x, rotation_of, attend, cache, keep, adapters)
        elif isinstance(self.blocks, Block):
            x, cache = self._scan(self.blocks, x, rotation_of, attend, cache, adapters)
            x = x if keep is None else x[keep]
        elif self.is_switched:
            x, cache = _loop(_switched_layers(self.blocks), x, rotation_of, attend, cache, keep, adapters)
        else:
            last = len(self.blocks) - 1
            for index, block in enumerate(self.blocks):
                wanted = keep if index == last else None
                added = None if adapters is None else adapters.of_layer(index)
                x, cache = block(x, rotation_of(index), partial(attend, index), cache, wanted, added)
        return x if self.final_norm is None else self.final_norm(x), cache

    def _embed(self, ids: Int[Array, "T"], positions: Int[Array, "T"]) -> Float[Array, "T E"]:
        assert self.embedding is not None, "the first stage has the embedding"
        x = self.embedding(ids)
        x = x * self.embedding_scale if self.embedding_scale != 1 else x
        return x if self.positions is None else x + self.positions(positions)

    def _scan[Cache](
        self,
        blocks: Block,
        x: Float[Array, "T E"],
        rotation_of: RotationOf,
        attend: Attend[Cache],
        cache: Cache,
        adapters: Adapters | None,
    ) -> tuple[Float[Array, "T E"], Cache]:
        """Run all layers with one compiled body."""
        structure, stacked = nnx.split(blocks)

        def layer(carry: tuple[Array, Cache], inputs: tuple[Array, nnx.State]) -> tuple[tuple[Array, Cache], None]:
            x, cache = carry
            index, parameters = inputs
            block: Block = nnx.merge(structure, parameters)
            added = None if adapters is None else adapters.of_layer(index)
            return block(x, rotation_of(index), partial(attend, index), cache, adapters=added), None

        index = jnp.arange(self.num_layers, dtype=jnp.int32)
        (x, cache), _ = jax.lax.scan(layer, (x, cache), (index, stacked))
        return x, cache

    def unstack(self, *, switched: bool = False) -> None:
        """Replace the stacked parameters by separate arrays for each layer, or stacked shapes by separate shapes.

        The layers are then unrolled, or if `switched`, run in a loop with a switch between their weights. On a CPU and
        a GPU, a scan copies the weights of every layer out of the stack in each iteration. A TPU reads it in place.
        """
        assert isinstance(self.blocks, Block), "the decoder is unstacked already"
        self.is_switched = switched
        structure, stacked = nnx.split(self.blocks)
        waiting = list(nnx.to_flat_state(stacked))
        self.blocks = nnx.List([])
        del stacked  # so that each stack is freed as soon as its slices are there
        if not isinstance(waiting[0][1].get_value(), jax.ShapeDtypeStruct):
            gc.collect()  # the block before is in a cycle, and would keep all stacks
        layers: list[list[Any]] = [[] for _ in range(self.num_layers)]
        while waiting:
            path, variable = waiting.pop()
            stack, axes = variable.get_value(), variable.get_metadata("axes")
            for index, layer in enumerate(layers):
                layer.append((path, variable.replace(_layer_of(stack, index), axes=axes[1:])))
        self.blocks = nnx.List([nnx.merge(structure, nnx.from_flat_state(layer)) for layer in layers])

    def can_pack(self, library: Library) -> bool:
        """True if the layers are stacked, and all their matrices have a packed form."""
        if not isinstance(self.blocks, Block) or not isinstance(self.blocks.mlp, Mlp):
            return False
        return all(layer.has_packed_form(library) for layer in self.blocks.linear_layers)

    def pack(self, library: Library, num_devices: int) -> None:
        """Pack the matrices of all layers, or their shapes; see `packed_matrix` and `read_table`.

        Stacked layers are then run in a loop with one compiled body. They must be unstacked unless `can_pack`.
        """
        if self.span.is_last:
            self.unembedding.pack(library, num_devices)
        self.is_packed = isinstance(self.blocks, Block)
        assert not self.is_packed or self.can_pack(library), "some stacked matrices have no packed form"
        for block in [self.blocks] if isinstance(self.blocks, Block) else self.blocks:
            for layer in block.linear_layers:
                layer.pack(library, num_devices)

    @property
    def unembedding(self) -> Table:
        """The table with the logits as its `scores`. Those at and after `config.vocab_size` are padding."""
        table = self.embedding if self.head is None else self.head
        assert table is not None, "the last stage has the unembedding"
        return table

    def unembed(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Logits of hidden vectors."""
        return self.unembedding.scores(hidden)


def _no_rotation(layer: Index) -> None:
    """The rotation of layers with learned positions."""


def _layer_of(stack: jax.Array | jax.ShapeDtypeStruct, index: int) -> jax.Array | jax.ShapeDtypeStruct:
    """One layer of stacked values, or its shape."""
    if isinstance(stack, jax.Array):
        return stack[index]
    assert isinstance(stack.sharding, NamedSharding)
    sharding = NamedSharding(stack.sharding.mesh, PartitionSpec(*stack.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


type Between = Callable[[Index, Array, Projections, Array], tuple[Array, Projections]]
"""The parts after the attention of a layer and before that of the next one."""


class _LoopOfLayers(NamedTuple):
    """The layers of a loop, and a call that runs a function on the current one."""

    number: int
    block_of: Callable[[Index], Block]
    call: Callable[[Between, Int[Array, ""], Array, Projections, Array], tuple[Array, Projections]]
    """Calls the function with the arguments after it. The index of the last layer is an integer."""


def _switched_layers(blocks: Sequence[Block]) -> _LoopOfLayers:
    """Layers with weights of their own, which a switch selects.

    XLA compiles each layer of an unrolled program anew, and most of this is attention with its loops. In this form 12
    layers compile in a quarter of the time. The results are the same bits, in the same time, on a CPU: there a branch
    costs nothing and copies no weights. A GPU would wait for its host at each branch.
    """

    def call(between: Between, index: Int[Array, ""], *args: Any) -> tuple[Array, Projections]:
        branches = [partial(between, each) for each in range(len(blocks))]
        return jax.lax.switch(index, branches, *args)

    return _LoopOfLayers(len(blocks), lambda index: blocks[index], call)  # type: ignore[index]


def _packed_layers(stack: Block, number: int) -> _LoopOfLayers:
    """Layers with packed matrices in stacks. All but the last share one compiled body."""
    structure, state = nnx.split(stack)
    parameters = nnx.to_flat_state(state)

    def block_of(index: Index) -> Block:
        of_layer = [(path, layer_of(variable, jnp.int32(index))) for path, variable in parameters]
        return nnx.merge(structure, nnx.from_flat_state(of_layer))

    def call(between: Between, index: Int[Array, ""], *args: Any) -> tuple[Array, Projections]:
        branches = partial(between, index), partial(between, number - 1)
        return jax.lax.cond(index < number - 1, *branches, *args)

    return _LoopOfLayers(number, block_of, call)


def _loop[Cache](
    layers: _LoopOfLayers,
    x: Float[Array, "T E"],
    rotation_of: RotationOf,
    attend: Attend[Cache],
    cache: Cache,
    keep: Int[Array, "B"] | None,
    adapters: Adapters | None,
) -> tuple[Float[Array, "B E"], Cache]:
    """Run all layers in a loop with one compiled attention."""
    last = layers.number - 1

    def added(index: Index) -> LayerAdapters | None:
        return None if adapters is None else adapters.of_layer(index)

    def between(
        index: Index, x: Float[Array, "T E"], heads: Projections, out: Float[Array, "T H D"]
    ) -> tuple[Float[Array, "T E"], Projections]:
        if isinstance(index, int) and index == last:
            kept = layers.block_of(last).finish(x, out, keep, added(last))
            return jnp.pad(kept, ((0, x.shape[0] - kept.shape[0]), (0, 0))), heads
        x = layers.block_of(index).finish(x, out, adapters=added(index))
        return x, layers.block_of(index + 1).project(x, rotation_of(index + 1), added(index + 1))

    def layer(index: Int[Array, ""], carry: tuple[Array, Projections, Cache]) -> tuple[Array, Projections, Cache]:
        x, heads, cache = carry
        out, cache = attend(index, *heads, cache)
        return *layers.call(between, index, x, heads, out), cache

    heads = layers.block_of(0).project(x, rotation_of(0), added(0))
    x, _, cache = jax.lax.fori_loop(0, layers.number, layer, (x, heads, cache))
    return x if keep is None else x[: keep.shape[0]], cache
