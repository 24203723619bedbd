"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, tied embeddings. GPT-3 is a larger GPT-2."""

import re
from typing import NamedTuple

from orca_jax.model.families.base import Family, JoinedPart, Weight, head, norm
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_equal_heads,
    get_float,
    get_int,
    get_layers,
    token_ids,
)
from orca_jax.values.config import ModelConfig


class GPTKeys(NamedTuple):
    """The keys of a config.json near GPT-2, with the defaults of transformers.

    Attributes:
        heads: number of heads.
        embed: size of the embedding.
        layers: number of layers.
        mlp: numbers in the middle of an MLP; without a default four times `embed`.
        positions: most tokens of a request.
        activation: that of the MLP.
        vocab_size: default of the key of this name.
        norm_eps: key of the number in norms, 1e-5 by default; None: there is no key.
    """

    heads: tuple[str, int]
    embed: tuple[str, int]
    layers: tuple[str, int]
    mlp: tuple[str, int | None]
    positions: tuple[str, int]
    activation: tuple[str, str]
    vocab_size: int
    norm_eps: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of all keys."""
        pairs = self.heads, self.embed, self.layers, self.mlp, self.positions, self.activation
        return frozenset({"vocab_size", *(key for key, _ in pairs), *filter(None, [self.norm_eps])})


_KEYS = GPTKeys(
    ("n_head", 12),
    ("n_embd", 768),
    ("n_layer", 12),
    ("n_inner", None),
    ("n_positions", 1024),
    ("activation_function", "gelu_new"),
    50257,
    "layer_norm_epsilon",
)


def read_shape(hf: HfConfig, family: str, keys: GPTKeys) -> ModelConfig:
    """Read the keys of a decoder with LayerNorm, plain MLPs, and biases everywhere. Without a key there are no end
    tokens.

    Raises:
        ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
    """
    heads, embed = get_equal_heads(hf, *keys.heads, *keys.embed)
    mlp_key, mlp_dim = keys.mlp
    return ModelConfig(
        family=family,
        vocab_size=get_int(hf, "vocab_size", keys.vocab_size),
        num_layers=get_layers(hf, *keys.layers),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        mlp_dim=get_int(hf, mlp_key, mlp_dim or 4 * embed),
        max_positions=get_int(hf, *keys.positions),
        norm="layernorm",
        norm_eps=get_float(hf, keys.norm_eps, 1e-5) if keys.norm_eps else 1e-5,
        activation=get_activation(hf, *keys.activation),
        gated_mlp=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=get_bool(hf, "tie_word_embeddings", True),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=first_token_id(hf, "bos_token_id"),
    )


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a GPT-2 config.json; raises `ConfigError` as `read_shape` does."""
    return read_shape(hf, "gpt2", _KEYS)


def _linear(key: str, path: str, part: JoinedPart | None = None) -> tuple[Weight, Weight]:
    """Rows for a linear layer. GPT-2 stores its matrices as [in, out], so nothing is transposed."""
    return Weight(f"{key}.weight", f"{path}.kernel", part=part), Weight(
        f"{key}.bias", f"{path}.bias", part=part
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. Queries, keys and values are thirds of one tensor."""
    thirds = (config.embed_dim,) * 3
    return (
        Weight("wte.weight", "embedding.table"),
        Weight("wpe.weight", "positions.table"),
        *norm("h.{layer}.ln_1", "blocks.attention_norm"),
        *_linear("h.{layer}.attn.c_attn", "blocks.attention.query", JoinedPart(0, thirds)),
        *_linear("h.{layer}.attn.c_attn", "blocks.attention.key", JoinedPart(1, thirds)),
        *_linear("h.{layer}.attn.c_attn", "blocks.attention.value", JoinedPart(2, thirds)),
        *_linear("h.{layer}.attn.c_proj", "blocks.attention.out"),
        *norm("h.{layer}.ln_2", "blocks.mlp_norm"),
        *_linear("h.{layer}.mlp.c_fc", "blocks.mlp.up"),
        *_linear("h.{layer}.mlp.c_proj", "blocks.mlp.down"),
        *norm("ln_f", "final_norm"),
        *head(config),
    )


GPT2 = Family(
    name="gpt2",
    models="GPT-2, DistilGPT2, DialoGPT, Cerebras-GPT",
    config_from_hf=config_from_hf,
    keys=_KEYS.names,
    architectures=("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"),
    weights=weights,
    prefixes=("transformer.", ""),
    # causal masks of old checkpoints
    ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    fixed={"scale_attn_weights": (True, None), "scale_attn_by_inverse_layer_idx": (False, None)},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
