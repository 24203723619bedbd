"""Trees of Tunix, as its `CheckpointManager` writes them: `model_params/layers/0/attn/q_proj/w`."""

import logging

from orca_jax.model.trees.rows import Pick, Reshape, Transpose, TreeOperation, TreeRow, TreeTable
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

ANCHOR = ("embedder", "input_embedding")
"""The keys of the embedding."""

_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3_text")
_FAMILIES = ("llama", "qwen2", "qwen3", *_GEMMAS)
_NAMES = (("query", "q"), ("key", "k"), ("value", "v"))
# of Tunix 0.1.7, for any `rope_theta` of its configuration
_FIXED_THETA = {"llama": 1e6, "qwen3": 1e6}

logger = logging.getLogger(__name__)


def table(config: ModelConfig) -> TreeTable:
    """The rows of a model.

    Raises:
        ConfigError: Tunix has no models of this family in this form.
    """
    if config.family not in _FAMILIES:
        message = (
            f"trees of Tunix are read for the families {', '.join(_FAMILIES)}, not for {config.family}; describe the "
            "tree in mapping.json (docs/own_models.md)"
        )
        raise ConfigError(message, param="model")
    theta = _FIXED_THETA.get(config.family)
    if theta is not None and config.rope is not None and config.rope.theta != theta:
        logger.warning(
            "Tunix rotates %s with a rope_theta of %d, and config.json has %g: if Tunix trained this model for long, "
            "set rope_theta in config.json to %d",
            *(config.family, theta, config.rope.theta, theta),
        )
    if config.family == "llama" and config.rope is not None and config.rope.kind != "default":
        logger.warning(
            "Tunix rotates llama without scaling, and config.json has the scaling %s, as Llama 3.1 and 3.2 have: if "
            "Tunix trained this model for long, remove the scaling from config.json",
            config.rope.kind,
        )

    own = _gemma(config) if config.family in _GEMMAS else _llama(config)
    mlp = [_row(f"mlp/{name}_proj/kernel", f"mlp.{name}.kernel") for name in ("gate", "up", "down")]
    return TreeTable("Tunix", (TreeRow("/".join(ANCHOR), "embedding.table"), *own, *mlp))


def _row(key: str, path: str, *operations: TreeOperation) -> TreeRow:
    return TreeRow(f"layers/{{layer}}/{key}", f"blocks.{path}", operations)


def _llama(config: ModelConfig) -> list[TreeRow]:
    """The rows of Llama and Qwen but for the embedding and the MLP."""
    merged = Reshape((config.embed_dim, -1))
    rows = [
        _row(f"attn/{short}_proj/w", f"attention.{name}.kernel", merged) for name, short in _NAMES
    ]
    if config.attention_bias:
        rows += [_row(f"attn/{short}_bias", f"attention.{name}.bias") for name, short in _NAMES]
    if config.qk_norm:
        rows += [
            _row(f"attn/{short}_norm/w", f"attention.{name}_norm.scale")
            for name, short in _NAMES[:2]
        ]
    if not config.tied_embeddings:
        rows.append(TreeRow("lm_head/w", "head.table", (Transpose((1, 0)),)))
    return [
        *rows,
        _row("attn/o_proj/w", "attention.out.kernel", Reshape((-1, config.embed_dim))),
        _row("input_layernorm/w", "attention_norm.scale"),
        _row("post_attention_layernorm/w", "mlp_norm.scale"),
        TreeRow("final_norm/w", "final_norm.scale"),
    ]


def _gemma(config: ModelConfig) -> list[TreeRow]:
    """The rows of Gemma but for the embedding and the MLP. Heads are an axis before that of their inputs."""
    by_head = (Transpose((1, 0, 2)), Reshape((config.embed_dim, -1)))
    if config.num_heads == config.num_kv_heads // config.kv_copies:
        rows = [
            _row("attn/qkv_einsum/w", f"attention.{name}.kernel", Pick(0, at), *by_head)
            for at, (name, _) in enumerate(_NAMES)
        ]
    else:
        rows = [_row("attn/q_einsum/w", "attention.query.kernel", *by_head)] + [
            _row("attn/kv_einsum/w", f"attention.{name}.kernel", Pick(0, at), *by_head)
            for at, name in enumerate(("key", "value"))
        ]
    if config.qk_norm:
        rows += [
            _row(f"attn/_{name}_norm/scale", f"attention.{name}_norm.scale")
            for name in ("query", "key")
        ]
    if config.residual == "both_norms":
        after = "post_attn_norm" if config.family == "gemma2" else "post_attention_norm"
        rows += [
            _row(f"{after}/scale", "attention_out_norm.scale"),
            _row("post_ffw_norm/scale", "mlp_out_norm.scale"),
        ]
    out = Reshape((-1, config.embed_dim))
    return [
        *rows,
        _row("attn/attn_vec_einsum/w", "attention.out.kernel", out),
        _row("pre_attention_norm/scale", "attention_norm.scale"),
        _row("pre_ffw_norm/scale", "mlp_norm.scale"),
        TreeRow("final_norm/scale", "final_norm.scale"),
    ]
