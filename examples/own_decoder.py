"""A decoder of one's own, served: a GPT with squared ReLU, no biases, and a learned weight of each residual branch.

    python examples/own_decoder.py
    orca-jax serve --model MODEL --decoder examples/own_decoder.py:SquaredReluGPT

The class has parameters and a forward pass over the merged tokens of a batch. `attend` is the engine's: it keeps the
KV cache and separates the requests. See docs/own_models.md.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from orca_jax import LLM, SamplingParams
from orca_jax.model.layers import Linear, Table
from orca_jax.model.maker import Maker
from orca_jax.model.own import OwnDecoder, own_config
from orca_jax.values.config import ModelConfig


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream with a learned weight."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        embed, inner = config.embed_dim, config.mlp_dim
        heads = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        # The last argument names the logical axes, by which tensor parallelism splits the parameters.
        self.query = Linear(make, (embed, heads), ("embed", "heads"), bias=False)
        self.key = Linear(make, (embed, heads), ("embed", "kv_heads"), bias=False)
        self.value = Linear(make, (embed, heads), ("embed", "kv_heads"), bias=False)
        self.out = Linear(make, (heads, embed), ("heads", "embed"), bias=False)
        self.up = Linear(make, (embed, inner), ("embed", "mlp"), bias=False)
        self.down = Linear(make, (inner, embed), ("mlp", "embed"), bias=False)
        self.branch_weights = make((2, embed), ("layers", "embed"), "ones")

    def __call__(self, number: int, x: jax.Array, attend: Any, cache: Any) -> tuple[jax.Array, Any]:
        """Run one layer on all tokens."""
        of_attention, of_mlp = self.branch_weights[...].astype(jnp.float32)
        inputs = normalised(x)
        split = (
            project(inputs).reshape(len(x), -1, self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        heads, cache = attend(jnp.int32(number), *split, cache)
        x = x + of_attention * self.out(heads.reshape(len(x), -1))
        hidden = jax.nn.relu(self.up(normalised(x)))
        return x + of_mlp * self.down(hidden * hidden), cache


class SquaredReluGPT(OwnDecoder):
    """The decoder: learned positions, layers, and an unembedding of its own."""

    def __init__(self, config: ModelConfig, make: Maker, vocab_rows: int) -> None:
        self.embedding = Table(make, vocab_rows, config.embed_dim, "vocab", used=config.vocab_size)
        self.positions = Table(make, config.max_positions, config.embed_dim, "positions")
        self.layers = nnx.List([Layer(config, make) for _ in range(config.num_layers)])
        self.head = Table(make, vocab_rows, config.embed_dim, "vocab", used=config.vocab_size)

    @classmethod
    def config_from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json with names of our own."""
        return own_config(
            vocab_size=values["vocab_size"],
            num_layers=values["depth"],
            embed_dim=values["width"],
            num_heads=values["heads"],
            max_positions=values["context"],
        )

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        attend: Any,
        cache: Any,
        keep: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden vectors of all tokens, or of those in `keep`."""
        x = self.embedding(inputs) + self.positions(positions)
        for number, layer in enumerate(self.layers):
            x, cache = layer(number, x, attend, cache)
        return normalised(x if keep is None else x[keep]), cache

    @property
    def unembedding(self) -> Table:
        """The table of the logits."""
        return self.head


def normalised(x: jax.Array) -> jax.Array:
    """RMSNorm without a scale."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def save_untrained(directory: Path) -> None:
    """Write a model directory: config.json, and the state of a module as a training script would save it."""
    values = {
        "vocab_size": 258,
        "depth": 2,
        "width": 32,
        "heads": 4,
        "context": 128,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(values))
    config = SquaredReluGPT.config_from_json(values)
    model = SquaredReluGPT(
        config, Maker(jnp.dtype("float32"), nnx.Rngs(0)), vocab_rows=config.vocab_size
    )
    with ocp.CheckpointManager(directory / "params") as manager:
        manager.save(1000, args=ocp.args.StandardSave({"model": nnx.state(model)}))


def main() -> None:
    """Save a model, and serve it."""
    with tempfile.TemporaryDirectory() as folder:
        save_untrained(Path(folder))
        llm = LLM(
            model=folder,
            decoder=SquaredReluGPT,
            tokenizer="byte",
            max_num_seqs=4,
            max_num_batched_tokens=64,
        )
        for output in llm.generate(["One", "Two"], SamplingParams(max_tokens=8), use_tqdm=False):
            print(output.prompt, output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
