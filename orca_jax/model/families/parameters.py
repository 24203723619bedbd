"""The parameters that a decoder has by its configuration, with the words for them in `names.py`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import (
    SHARED_MIXERS,
    WITHOUT_MLP_NORM,
    ExpertsConfig,
    MixerName,
)

ParameterKind = Literal["table", "norm", "linear", "matrix", "conv", "vector", "scalar"]


class ModelParameter(NamedTuple):
    """A parameter, or a linear layer or norm with its bias.

    Attributes:
        name: its name in the names of a family.
        kind: gives the suffixes of tensors and paths.
        columns: outputs of a matrix that may share a tensor with others.
        has_bias: whether the layer has one.
        heads: the number of heads with rotated columns.
        rotated: the first rotated column of each of these heads, and the one after the last.
        place: the path of its part, which the name's last words follow; empty: the name is the path.
    """

    name: str
    kind: ParameterKind
    columns: int = 0
    has_bias: bool = False
    heads: int = 1
    rotated: tuple[int, int] = (0, 0)
    place: str = ""

    @property
    def path(self) -> str:
        """The path in the decoder, without a suffix."""
        if not self.place:
            return self.name
        return f"{self.place}.{self.name.partition('.')[2] or self.name}"


def parameters(config: ModelConfig) -> Iterator[ModelParameter]:
    """All parameters. In a shared tensor their columns have the same order."""
    yield from _outer(config)
    yield from _placed("blocks", _beside_parts(config))
    if config.layer_inputs is not None:
        yield from _placed("blocks.layer_input", _with_norm("layer_input", "gate projection"))
    for mixer in config.mixers:
        yield from _of_mixer(config, mixer)
    yield from _mlps(config)


def _outer(config: ModelConfig) -> Iterator[ModelParameter]:
    """The parameters outside of layers."""
    yield ModelParameter("embedding", "table")
    if config.learned_positions:
        yield ModelParameter("positions", "table")
    if config.layer_inputs is not None:
        yield ModelParameter("layer_inputs.table", "table")
        yield from _with_norm("layer_inputs", "projection")
    yield from _norms(config, "final_norm")
    if not config.tied_embeddings:
        yield ModelParameter("head", "table")
    if config.head_bias:
        yield ModelParameter("head.bias", "vector")


def _norms(config: ModelConfig, *names: str) -> Iterator[ModelParameter]:
    has_bias = config.norm == "layernorm" and config.norm_bias
    if config.norm_scale:
        for name in names:
            yield ModelParameter(name, "norm", has_bias=has_bias)


def _beside_parts(config: ModelConfig) -> Iterator[ModelParameter]:
    """The parameters of a layer outside of its mixer and its MLP."""
    yield from _norms(config, "attention_norm")
    if config.residual not in WITHOUT_MLP_NORM:
        yield from _norms(config, "mlp_norm")
    if config.residual == "both_norms":
        yield from _norms(config, "attention_out_norm", "mlp_out_norm")
    if config.layer_scale:
        yield ModelParameter("layer_scale", "vector")


def _with_norm(part: str, names: str) -> Iterator[ModelParameter]:
    """Linear layers of a part, by their names, and its norm."""
    for name in names.split():
        yield ModelParameter(f"{part}.{name}", "linear")
    yield ModelParameter(f"{part}.norm", "norm")


def _layers(part: str, columns: Mapping[str, int], bias: bool = False) -> Iterator[ModelParameter]:
    """Linear layers of a part, by their columns."""
    for name, number in columns.items():
        yield ModelParameter(f"{part}.{name}", "linear", number, bias)


def _vectors(part: str, names: str) -> Iterator[ModelParameter]:
    for name in names.split():
        yield ModelParameter(f"{part}.{name}", "vector")


def _of_mixer(config: ModelConfig, mixer: MixerName) -> Iterator[ModelParameter]:
    if mixer == "attention_mamba":
        yield from _placed(f"blocks.{mixer}.attention", _attention(config, "attention"))
        yield from _placed(f"blocks.{mixer}.mamba", _mamba(config))
    else:
        parts = _MIXERS.get(mixer)
        found = _attention(config, mixer) if parts is None else parts(config)
        yield from _placed(f"blocks.{mixer}", found)


def _placed(place: str, found: Iterable[ModelParameter]) -> Iterator[ModelParameter]:
    for parameter in found:
        yield parameter._replace(place=place)


def _attention(config: ModelConfig, mixer: MixerName) -> Iterator[ModelParameter]:
    """The parameters of attention; some layers have no values, or neither keys nor values."""
    sizes = config.of_mixer(mixer)
    rotated = (0, sizes.head_dim)
    if config.rope is not None and config.rope.rotated_dim:
        rotated = (0, config.rope.rotated_dim)
    kv_heads = sizes.num_kv_heads // sizes.kv_copies
    queries = sizes.num_heads * sizes.head_dim
    keys = kv_heads * sizes.head_dim
    bias = config.attention_bias
    if config.residual == "carried":
        yield ModelParameter("attention.in_norm", "norm")
    yield ModelParameter("attention.query", "linear", queries, bias, sizes.num_heads, rotated)
    has_norms = config.qk_norm is not None and config.norm_scale
    if has_norms:
        yield ModelParameter("attention.query_norm", "norm")
    if mixer not in SHARED_MIXERS:
        yield ModelParameter("attention.key", "linear", keys, bias, kv_heads, rotated)
        if has_norms:
            yield ModelParameter("attention.key_norm", "norm")
        wide = config.wide
        if mixer != "wide_attention" or wide is None or not wide.keys_are_values:
            yield ModelParameter("attention.value", "linear", keys, bias)
    yield ModelParameter("attention.out", "linear", has_bias=config.attention_out_bias)
    if config.attention_gate:
        yield ModelParameter(
            "attention.gate", "linear", queries, bias and config.attention_gate == "all"
        )
    if config.attention_sinks:
        yield ModelParameter("attention.sinks", "vector")


def _latent_attention(config: ModelConfig) -> Iterator[ModelParameter]:
    sizes = config.latent
    assert sizes is not None, "the configuration has the sizes"
    bias = config.attention_bias
    dim = config.head_dim
    heads = config.num_heads
    queries = (dim - sizes.rotated_dim, dim)
    keys = (0, sizes.rotated_dim)
    if not sizes.is_interleaved:
        queries = (0, 0)
        keys = (0, 0)
    yield ModelParameter("latent.latent", "linear", sizes.rank, bias)
    yield ModelParameter("latent.rotated_key", "linear", sizes.rotated_dim, bias, 1, keys)
    name = "only_latent.query"
    if sizes.query_rank is not None:
        name = "latent.query"
        yield ModelParameter("latent.query_down", "linear", has_bias=bias)
        yield ModelParameter("latent.query_norm", "norm")
    yield ModelParameter(name, "linear", heads * dim, False, heads, queries)
    yield ModelParameter("latent.latent_norm", "norm")
    yield ModelParameter("latent.up", "vector")
    yield ModelParameter("latent.out", "linear", has_bias=config.attention_out_bias)


def _short_conv(config: ModelConfig) -> Iterator[ModelParameter]:
    assert config.short_conv is not None, "the configuration has the sizes"
    bias = config.short_conv.has_bias
    yield ModelParameter("short_conv.kernel", "conv")
    if bias:
        yield ModelParameter("short_conv.bias", "vector")
    yield from _layers(
        "short_conv", dict.fromkeys(("before", "after", "value"), config.embed_dim), bias
    )
    yield ModelParameter("short_conv.out", "linear", has_bias=bias)


def _linear_attention(config: ModelConfig) -> Iterator[ModelParameter]:
    width = config.num_heads * config.head_dim
    yield from _layers("linear", dict.fromkeys(("query", "key", "value"), width))
    yield from _with_norm("linear", "gate out")


def _delta_rule(config: ModelConfig) -> Iterator[ModelParameter]:
    sizes = config.delta_rule
    assert sizes is not None, "the configuration has the sizes"
    columns = {"query": sizes.keys, "key": sizes.keys, "value": sizes.values}
    others = {"gate": sizes.values, "beta": sizes.num_heads, "step": sizes.num_heads}
    yield from _layers("delta", {**columns, **others})
    for name, number in columns.items():
        yield ModelParameter(f"delta.{name}_taps", "conv", number)
    yield from _vectors("delta", "rate step_bias")
    yield from _with_norm("delta", "out")


def _mamba(config: ModelConfig) -> Iterator[ModelParameter]:
    sizes = config.mamba
    assert sizes is not None, "the configuration has the sizes"
    bias = sizes.has_bias
    columns = {"value": sizes.values, "key": sizes.keys, "step": sizes.num_heads}
    yield from _layers("mamba", {"gate": sizes.values, **columns}, bias)
    yield ModelParameter("mamba.taps", "conv", sizes.values)
    yield ModelParameter("mamba.key_taps", "conv", sizes.keys)
    if sizes.has_conv_bias:
        yield ModelParameter("mamba.bias", "vector", sizes.values)
        yield ModelParameter("mamba.key_bias", "vector", sizes.keys)
    yield from _vectors("mamba", "rate step_bias skip")
    if sizes.norm:
        yield ModelParameter("mamba.norm", "vector")
    yield ModelParameter("mamba.out", "linear", has_bias=bias)


_MIXERS: Mapping[MixerName, Callable[[ModelConfig], Iterable[ModelParameter]]] = {
    "latent_attention": _latent_attention,
    "short_conv": _short_conv,
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "mamba": _mamba,
    "no_mixer": lambda config: (),
}
"""Other mixers have the parameters of attention."""


def _mlps(config: ModelConfig) -> Iterator[ModelParameter]:
    """The parameters of MLPs and experts."""
    experts = config.experts
    if config.layers_with("dense_mlp"):
        yield from _placed("blocks.dense_mlp", _mlp(config, config.dense_mlp_dim))
    if experts is None:
        if config.layers_with("mlp"):
            yield from _placed("blocks.mlp", _mlp(config, config.mlp_dim))
    elif experts.beside_dim:
        yield from _placed("blocks.mlp.dense", _mlp(config, experts.beside_dim))
        for name in ("dense_norm", "in_norm", "out_norm"):
            yield ModelParameter(f"beside.{name}", "norm", place="blocks.mlp")
        yield ModelParameter("beside.router_norm.scale", "vector", place="blocks.mlp")
        yield ModelParameter("beside.factors", "vector", place="blocks.mlp.mlp")
        yield from _placed("blocks.mlp.mlp", _experts(config, experts))
    else:
        yield from _placed("blocks.mlp", _experts(config, experts))
        if experts.shared_dim:
            yield from _shared(config, experts)


def _mlp(config: ModelConfig, width: int) -> Iterator[ModelParameter]:
    if config.gated_mlp:
        yield ModelParameter("mlp.gate", "linear", width, config.mlp_bias)
    yield ModelParameter("mlp.up", "linear", width, config.mlp_bias)
    yield ModelParameter("mlp.down", "linear", has_bias=config.mlp_bias)
    if config.residual == "carried":
        yield ModelParameter("mlp.last", "linear")
    if config.activation == "xielu":
        yield from _vectors("mlp.xielu", "positive negative")
        for name in ("slope", "least"):
            yield ModelParameter(f"mlp.xielu.{name}", "scalar")


def _experts(config: ModelConfig, experts: ExpertsConfig) -> Iterator[ModelParameter]:
    """The parameters of experts and of their router."""
    width = config.mlp_dim
    yield ModelParameter("experts.router", "matrix")
    if experts.router.has_bias:
        yield ModelParameter("experts.choice_bias", "vector")
    if config.gated_mlp:
        yield ModelParameter("experts.gate", "matrix", width)
    yield ModelParameter("experts.up", "matrix", width)
    yield ModelParameter("experts.down", "matrix")
    if experts.has_biases:
        yield ModelParameter("experts.router_bias", "vector")
        yield ModelParameter("experts.biases.gate", "vector", width)
        yield ModelParameter("experts.biases.up", "vector", width)
        yield ModelParameter("experts.biases.down", "vector")


def _shared(config: ModelConfig, experts: ExpertsConfig) -> Iterator[ModelParameter]:
    """The parameters of the expert of all tokens."""
    columns = {"up": experts.shared_dim, "down": 0}
    if config.gated_mlp:
        columns = {"gate": experts.shared_dim, **columns}
    yield from _placed("blocks.mlp.shared.mlp", _layers("shared", columns, config.mlp_bias))
    if experts.shared_gate:
        yield ModelParameter("shared.weight", "matrix", place="blocks.mlp.shared")
