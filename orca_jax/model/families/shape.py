"""The shape of a decoder without its family's own options: like Llama's, or like GPT-2's."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from orca_jax.model.families.rope import WHOLE_HEADS, RopeRules, read_rope
from orca_jax.model.families.types import TYPES
from orca_jax.model.families.values import (
    HfConfig,
    first_token_id,
    get_activation,
    get_bool,
    get_float,
    get_int,
    get_layers,
    token_ids,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import LayerKind


@runtime_checkable
class FamilyShape(Protocol):
    """The sizes of a family, which are read before its other options."""

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read a config.json with checked keys.

        Raises:
            ConfigError: the decoder does not support an option, or a value is invalid. The error names the key.
        """


class LlamaShape(NamedTuple):
    """Keys and defaults beside the sizes of `TYPES`. There are RMSNorm, a gated MLP, and no biases.

    Attributes:
        norm_key: the key of the number in norms; None: it is the default, always.
        activation: default of `activation_key`.
        rules: the rules of rotary positions, beside the default of their base.
        activation_key: the key of the activation; None: it is the default, always.
    """

    norm_key: str | None = "rms_norm_eps"
    activation: str = "silu"
    rules: RopeRules = WHOLE_HEADS
    activation_key: str | None = "hidden_act"

    def read(self, hf: HfConfig, family: str, **sizes: int) -> ModelConfig:
        """Read the shape. Missing keys get the defaults of transformers, and without a key there are no end tokens.

        `sizes` replace sizes of `TYPES`. Raises as `FamilyShape.read`.
        """
        row = TYPES[family]
        defaults = {**TYPES["llama"].sizes, **row.sizes, **sizes}
        embed = get_int(hf, "hidden_size", defaults["hidden_size"])
        heads = get_int(hf, "num_attention_heads", defaults["num_attention_heads"])
        kv_heads = get_int(hf, "num_key_value_heads", _kv_heads(hf, heads, defaults))
        width = defaults.get("head_dim")
        if "head_dim" in hf:  # null: a share of the embedding
            width = None
        if hf.get("head_dim") is None and width is None and embed % heads:
            raise ConfigError(
                f"config.json: num_attention_heads {heads} does not divide hidden_size {embed}; set head_dim",
                param="num_attention_heads",
            )
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}",
                param="num_key_value_heads",
            )
        head_dim = get_int(hf, "head_dim", width or embed // heads)
        limit = get_int(hf, "max_position_embeddings", defaults["max_position_embeddings"])
        rules = self.rules._replace(theta=row.theta)
        rotary, max_positions = read_rope(hf, head_dim, limit, rules)
        norm_eps = row.norm_eps
        if self.norm_key is not None:
            norm_eps = get_float(hf, self.norm_key, norm_eps)
        number = get_layers(hf, "num_hidden_layers", defaults["num_hidden_layers"])
        return ModelConfig(
            family=family,
            vocab_size=get_int(hf, "vocab_size", defaults["vocab_size"]),
            layers=(LayerKind(rope=rotary),) * number,
            embed_dim=embed,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_dim=get_int(hf, "intermediate_size", defaults["intermediate_size"]),
            max_positions=max_positions,
            norm="rmsnorm",
            norm_eps=norm_eps,
            activation=get_activation(hf, self.activation_key, self.activation),
            gated_mlp=True,
            attention_bias=False,
            mlp_bias=False,
            tied_embeddings=get_bool(hf, "tie_word_embeddings", row.is_tied),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=first_token_id(hf, "bos_token_id"),
        )


def _kv_heads(hf: HfConfig, heads: int, defaults: Mapping[str, int]) -> int:
    """The default of `num_key_value_heads`; null is as many as heads."""
    if "num_key_value_heads" in hf:
        return heads
    return defaults.get("num_key_value_heads", heads)


class GPTShape(NamedTuple):
    """Keys like GPT-2's. There are LayerNorm, learned positions, plain MLPs, and biases everywhere.

    Attributes:
        keys: heads, embedding, layers, width of an MLP, positions and activation, in this order.
        activation: default of its key.
        norm_eps: key of the number in norms; None: there is no key.
    """

    keys: str
    activation: str
    norm_eps: str | None = None

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read the shape. Without a key there are no end tokens. Raises as `FamilyShape.read`."""
        heads_key, embed_key, layers_key, mlp_key, positions_key, activation_key = self.keys.split()
        sizes = TYPES[family].sizes
        embed = get_int(hf, embed_key, sizes["hidden_size"])
        heads = get_int(hf, heads_key, sizes["num_attention_heads"])
        if embed % heads:
            raise ConfigError(
                f"config.json: {heads_key} {heads} does not divide {embed_key} {embed}",
                param=heads_key,
            )
        norm_eps = TYPES[family].norm_eps
        if self.norm_eps is not None:
            norm_eps = get_float(hf, self.norm_eps, norm_eps)
        number = get_layers(hf, layers_key, sizes["num_hidden_layers"])
        return ModelConfig(
            family=family,
            vocab_size=get_int(hf, "vocab_size", sizes["vocab_size"]),
            layers=(LayerKind(),) * number,
            embed_dim=embed,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=embed // heads,
            mlp_dim=get_int(hf, mlp_key, sizes.get("intermediate_size", 4 * embed)),
            max_positions=get_int(hf, positions_key, sizes["max_position_embeddings"]),
            norm="layernorm",
            norm_eps=norm_eps,
            activation=get_activation(hf, activation_key, self.activation),
            gated_mlp=False,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            tied_embeddings=get_bool(hf, "tie_word_embeddings", TYPES[family].is_tied),
            learned_positions=True,
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=first_token_id(hf, "bos_token_id"),
        )
