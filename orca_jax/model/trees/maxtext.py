"""Trees of MaxText, as its training and its converters write them: `params/params/decoder/layers/...`.

In the Llama, Mistral and Mixtral models of MaxText, attention does not scale queries: the factor `head_dim ** -0.5` is
in the weights. With `rope_type` "llama3.1" the neighbours of a head are rotated, otherwise its halves.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from orca_jax.model.trees.rows import (
    Halves,
    Pick,
    Reshape,
    Scale,
    Section,
    Transpose,
    TreeOperation,
    TreeRow,
    TreeTable,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

ANCHOR = ("token_embedder", "embedding")
"""The keys of the embedding."""

_SCALED = ("llama", "mistral", "mixtral")  # families with the scale of queries in the weights
_FAMILIES = (*_SCALED, "qwen2", "qwen3", "qwen3_moe")
_EXPERTS = {"mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}  # the keys of their experts

MakeRow = Callable[..., TreeRow]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MaxTextOptions:
    """Settings of MaxText that a tree does not show, with MaxText's names.

    Args:
        param_scan_axis: the axis of scanned layers.
        rope_type: "llama3.1" rotates neighbours; None: it is used if config.json has the scaling "llama3".
        normalize_embedding_logits: the logits of a tied embedding are divided by the root of its width.
    """

    param_scan_axis: Literal[0, 1] = 1
    rope_type: Literal["default", "llama3.1"] | None = None
    normalize_embedding_logits: bool = False


def table(
    config: ModelConfig, keys: Collection[str], options: MaxTextOptions | None = None
) -> TreeTable:
    """The rows of a model.

    Args:
        config: the model.
        keys: the keys of the arrays, joined by slashes, below those of the tree.
        options: None for the defaults.

    Raises:
        ConfigError: MaxText's models of this family have another form.
    """
    options = options or MaxTextOptions()
    is_scaled = config.rope is not None and config.rope.kind == "llama3"
    if options.rope_type is None and config.family == "llama" and not is_scaled:
        logger.warning(
            "config.json has no rotary scaling llama3, so the halves of heads are rotated, as in MaxText's models "
            "other than llama3.1. Those rotate neighbours: for one of these add rope_scaling to config.json, and write "
            '{"table": "maxtext", "options": {"rope_type": "llama3.1"}} to mapping.json; for others write "default"'
        )
    if config.family not in _FAMILIES:
        message = (
            f"trees of MaxText are read for the families {', '.join(_FAMILIES)}, not for {config.family}; describe the "
            "tree in mapping.json (docs/own_models.md)"
        )
        raise ConfigError(message, param="model")
    is_scanned = any(key.startswith("decoder/layers/") for key in keys)
    layers = "decoder/layers" if is_scanned else "decoder/layers_{layer}"
    axis = options.param_scan_axis if is_scanned else None

    def row(key: str, path: str, *operations: TreeOperation) -> TreeRow:
        return TreeRow(f"{layers}/{key}", f"blocks.{path}", operations, axis)

    is_fused = any(key.endswith("/mlp/wi/kernel") for key in keys)
    experts = _EXPERTS.get(config.family)
    mlp = _experts(row, experts) if experts else _mlp(row, is_fused=is_fused)
    rows = [*_outer(config, options), *_attention(config, options, row), *mlp]
    return TreeTable(
        "MaxText",
        (
            *rows,
            row("pre_self_attention_layer_norm/scale", "attention_norm.scale"),
            row("post_self_attention_layer_norm/scale", "mlp_norm.scale"),
        ),
    )


def _outer(config: ModelConfig, options: MaxTextOptions) -> list[TreeRow]:
    """The tables and the last norm. MaxText may have more rows than the vocabulary, for its devices."""
    used = Section(0, 0, config.vocab_size)
    rows = [
        TreeRow("/".join(ANCHOR), "embedding.table", (used,)),
        TreeRow("decoder/decoder_norm/scale", "final_norm.scale"),
    ]
    if options.normalize_embedding_logits:
        if config.tied_embeddings:
            message = (
                "mapping.json: normalize_embedding_logits makes the unembedding another table than the embedding; set "
                "tie_word_embeddings to false in config.json"
            )
            raise ConfigError(message, param="normalize_embedding_logits")
        rows.append(TreeRow("/".join(ANCHOR), "head.table", (used, Scale(config.embed_dim**-0.5))))
    elif not config.tied_embeddings:
        rows.append(TreeRow("decoder/logits_dense/kernel", "head.table", (Transpose((1, 0)), used)))
    return rows


def _attention(config: ModelConfig, options: MaxTextOptions, row: MakeRow) -> list[TreeRow]:
    rope_type = options.rope_type
    if rope_type is None and config.rope is not None and config.rope.kind == "llama3":
        rope_type = "llama3.1"
    rotated: list[TreeOperation] = []
    if rope_type == "llama3.1":
        rotated.append(Halves(2))
    scaled: list[TreeOperation] = []
    if config.family in _SCALED:
        scaled.append(Scale(config.head_dim**0.5))
    merged = Reshape((config.embed_dim, -1))
    rows = [
        row("self_attention/query/kernel", "attention.query.kernel", *scaled, *rotated, merged),
        row("self_attention/key/kernel", "attention.key.kernel", *rotated, merged),
        row("self_attention/value/kernel", "attention.value.kernel", merged),
        row("self_attention/out/kernel", "attention.out.kernel", Reshape((-1, config.embed_dim))),
    ]
    if config.attention_bias:
        names = ("query", "key", "value")
        rows += [
            row(f"self_attention/{name}/bias", f"attention.{name}.bias", Reshape((-1,)))
            for name in names
        ]
    if config.qk_norm:
        rows += [
            row("self_attention/query_norm/scale", "attention.query_norm.scale"),
            row("self_attention/key_norm/scale", "attention.key_norm.scale"),
        ]
    return rows


def _mlp(row: MakeRow, *, is_fused: bool) -> list[TreeRow]:
    """The MLP; with `fused_mlp` of MaxText, gate and up are one array [E, 2, F]."""
    down = row("mlp/wo/kernel", "mlp.down.kernel")
    if is_fused:
        return [
            row("mlp/wi/kernel", f"mlp.{name}.kernel", Pick(1, at))
            for at, name in enumerate(("gate", "up"))
        ] + [down]
    return [
        row("mlp/wi_0/kernel", "mlp.gate.kernel"),
        row("mlp/wi_1/kernel", "mlp.up.kernel"),
        down,
    ]


def _experts(row: MakeRow, block: str) -> list[TreeRow]:
    """The router and the experts, whose axis comes before that of the layers."""
    return [
        row(f"{block}/gate/kernel", "mlp.router"),
        row(f"{block}/wi_0", "mlp.gate"),
        row(f"{block}/wi_1", "mlp.up"),
        row(f"{block}/wo", "mlp.down"),
    ]
