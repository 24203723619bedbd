"""Trees of Tunix, as its `CheckpointManager` writes them: `model_params/layers/0/attn/q_proj/w`."""

import logging

from orca_jax.model.trees.rows import Reshape, Transpose, TreeOperation, TreeRow, TreeTable
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

ANCHOR = ("embedder", "input_embedding")
"""The keys of the embedding."""

_FAMILIES = ("llama", "qwen2", "qwen3")
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

    def row(key: str, path: str, *operations: TreeOperation) -> TreeRow:
        return TreeRow(f"layers/{{layer}}/{key}", f"blocks.{path}", operations)

    merged = Reshape((config.embed_dim, -1))
    rows = [
        row(f"attn/{short}_proj/w", f"attention.{name}.kernel", merged) for name, short in _NAMES
    ]
    if config.attention_bias:
        rows += [row(f"attn/{short}_bias", f"attention.{name}.bias") for name, short in _NAMES]
    if config.qk_norm:
        rows += [
            row(f"attn/{short}_norm/w", f"attention.{name}_norm.scale")
            for name, short in _NAMES[:2]
        ]
    rows += [
        row(f"mlp/{name}_proj/kernel", f"mlp.{name}.kernel") for name in ("gate", "up", "down")
    ]
    if not config.tied_embeddings:
        rows.append(TreeRow("lm_head/w", "head.table", (Transpose((1, 0)),)))
    return TreeTable(
        "Tunix",
        (
            TreeRow("/".join(ANCHOR), "embedding.table"),
            *rows,
            row("attn/o_proj/w", "attention.out.kernel", Reshape((-1, config.embed_dim))),
            row("input_layernorm/w", "attention_norm.scale"),
            row("post_attention_layernorm/w", "mlp_norm.scale"),
            TreeRow("final_norm/w", "final_norm.scale"),
        ),
    )
