"""Families near GPT-2 and OPT, with learned positions: StarCoder 1, GPT-Neo and BioGPT; and StarCoder 2 with a rope."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orca_jax.model.families import gpt2, llama, opt
from orca_jax.model.families.base import (
    Family,
    JoinedPart,
    Weight,
    head,
    linear,
    linears,
    norm,
    norms,
)
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import HfConfig, get_activation, get_bool, get_int, refusal
from orca_jax.model.families.windows import window_of_all
from orca_jax.values.config import ModelConfig

_LOCAL, _GLOBAL = "local", "global"
_NEO_KEYS = gpt2.GPTKeys(
    ("num_heads", 16),
    ("hidden_size", 2048),
    ("num_layers", 24),
    ("intermediate_size", None),
    ("max_position_embeddings", 2048),
    ("activation_function", "gelu_new"),
    50257,
    "layer_norm_epsilon",
)
_BIOGPT_KEYS = gpt2.GPTKeys(
    ("num_attention_heads", 16),
    ("hidden_size", 1024),
    ("num_hidden_layers", 24),
    ("intermediate_size", 4096),
    ("max_position_embeddings", 1024),
    ("hidden_act", "gelu"),
    42384,
)


def bigcode_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of StarCoder 1; raises `ConfigError` as `gpt2.read_shape` does."""
    activation = get_activation(hf, "activation_function", "gelu_pytorch_tanh")
    config = replace(gpt2.config_from_hf(hf), family="gpt_bigcode", activation=activation)
    if get_bool(hf, "multi_query", True):
        config = replace(config, num_kv_heads=1)
    if not get_bool(hf, "scale_attn_weights", True):
        config = replace(config, attention_scale=1.0)
    return config


def bigcode_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. One tensor has queries, keys and values: of all heads, or of each head in turn."""
    kv_heads = config.num_kv_heads // config.kv_copies
    dim = config.head_dim
    groups = 1 if kv_heads == 1 else config.num_heads
    sizes = (config.num_heads * dim // groups, dim, dim)
    layer = "h.{layer}"
    rows: list[Weight] = []
    for index, name in enumerate(("query", "key", "value")):
        joined = linear(f"{layer}.attn.c_attn", f"blocks.attention.{name}", bias=True)
        rows += [replace(row, part=JoinedPart(index, sizes, groups)) for row in joined]
    return (
        *rows,
        *linear(f"{layer}.attn.c_proj", "blocks.attention.out", bias=True),
        *_beside_attention(config),
    )


def neo_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of GPT-Neo; raises `ConfigError` as `gpt2.read_shape` does."""
    config = gpt2.read_shape(hf, "gpt_neo", _NEO_KEYS)
    window = get_int(hf, "window_size", 256)
    kinds = _kinds(hf, config.num_layers)
    return replace(
        config,
        attention_bias=False,
        attention_scale=1.0,
        sliding_window=window if window < config.max_positions else None,
        window_pattern=tuple(kind == _LOCAL for kind in kinds),
    )


def _kinds(hf: HfConfig, num_layers: int) -> list[str]:
    """The kind of each layer: those of `attention_types`, pairs of some kinds and the number of their repetitions."""
    types: Any = hf.get("attention_types")
    if types is None and num_layers == 24:
        types = [[[_GLOBAL, _LOCAL], num_layers // 2]]
    try:
        kinds: list[str] = []
        for names, times in types:
            kinds += min(times, num_layers + 1) * [*names]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or not {*map(str, kinds)} <= {_LOCAL, _GLOBAL}:
        raise refusal(
            "attention_types",
            f"must give {_LOCAL} or {_GLOBAL} to each of {num_layers} layers",
            types,
        )
    listed = hf.get("attention_layers")
    if listed is not None and listed != kinds:
        raise refusal("attention_layers", "must be the layers of attention_types", listed)
    return kinds


def neo_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    attention = "h.{layer}.attn.attention"
    qkv = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    return (
        *linears(qkv, attention, "blocks.attention"),
        *linear(f"{attention}.out_proj", "blocks.attention.out", bias=True),
        *_beside_attention(config),
    )


def _beside_attention(config: ModelConfig) -> tuple[Weight, ...]:
    """All weights but those of attention. Matrices are [out, in], unlike those of GPT-2."""
    return (
        Weight("wte.weight", "embedding.table"),
        Weight("wpe.weight", "positions.table"),
        *norm("h.{layer}.ln_1", "blocks.attention_norm"),
        *norm("h.{layer}.ln_2", "blocks.mlp_norm"),
        *linear("h.{layer}.mlp.c_fc", "blocks.mlp.up", bias=True),
        *linear("h.{layer}.mlp.c_proj", "blocks.mlp.down", bias=True),
        *norm("ln_f", "final_norm"),
        *head(config),
    )


def biogpt_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of BioGPT; raises `ConfigError` as `gpt2.read_shape` does."""
    config = gpt2.read_shape(hf, "biogpt", _BIOGPT_KEYS)
    if get_bool(hf, "scale_embedding", True):
        return replace(config, embedding_scale=config.embed_dim**0.5)
    return config


def biogpt_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters: those of OPT, but for the last norm and the head."""
    rows = [row for row in opt.weights(config) if not row.path.startswith(("final_norm", "head"))]
    return *rows, *norm("layer_norm", "final_norm"), *head(config, "output_projection.weight")


def _starcoder2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    bias = get_bool(hf, "use_bias", True)
    return {
        "norm": "layernorm",
        "gated_mlp": False,
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), bias),
        "sliding_window": window_of_all(hf, None, config.max_positions),
    }


def starcoder2_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    names = {"layers.{layer}.input_layernorm": "blocks.attention_norm", "norm": "final_norm"}
    names["layers.{layer}.post_attention_layernorm"] = "blocks.mlp_norm"
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        *norms(names),
        *llama.attention_weights(config),
        *linear("layers.{layer}.mlp.c_fc", "blocks.mlp.up", bias=config.mlp_bias),
        *linear("layers.{layer}.mlp.c_proj", "blocks.mlp.down", bias=config.mlp_bias),
        *head(config),
    )


def _near_gpt2(
    name: str,
    models: str,
    prefix: str,
    config_from_hf: Callable[[HfConfig], ModelConfig],
    weights: Callable[[ModelConfig], tuple[Weight, ...]],
) -> Family:
    return replace(
        gpt2.GPT2,
        name=name,
        models=models,
        config_from_hf=config_from_hf,
        architectures=(f"{prefix}ForCausalLM", f"{prefix}Model"),
        weights=weights,
        fixed={},
    )


GPT_BIGCODE = replace(
    _near_gpt2(
        "gpt_bigcode", "StarCoder 1, SantaCoder", "GPTBigCode", bigcode_from_hf, bigcode_weights
    ),
    keys=gpt2.GPT2.keys | {"multi_query", "scale_attn_weights"},
    harmless=frozenset(
        {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"}
    ),
)
GPT_NEO = replace(
    _near_gpt2("gpt_neo", "GPT-Neo", "GPTNeo", neo_from_hf, neo_weights),
    keys=_NEO_KEYS.names | {"attention_layers", "attention_types", "window_size"},
    # causal masks
    ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)"),
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    harmless=frozenset({"embed_dropout", "resid_dropout"}),
)
BIOGPT = replace(
    opt.OPT,
    name="biogpt",
    models="BioGPT",
    config_from_hf=biogpt_from_hf,
    keys=_BIOGPT_KEYS.names | {"scale_embedding"},
    architectures=("BioGptForCausalLM", "BioGptModel"),
    weights=biogpt_weights,
    prefixes=("biogpt.", ""),
    fixed={},
    # eps is not read by transformers
    harmless=frozenset({"activation_dropout", "layer_norm_eps", "layerdrop"}),
)
STARCODER2 = near_llama(
    "starcoder2",
    "StarCoder 2",
    "Starcoder2",
    LlamaShape(1e-5, "norm_epsilon", "gelu_pytorch_tanh", is_tied=True),
    _starcoder2,
    frozenset({"sliding_window", "use_bias"}),
    starcoder2_weights,
    harmless=frozenset({"embedding_dropout", "residual_dropout"}),
)
