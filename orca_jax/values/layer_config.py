"""The sizes and options of the parts of a layer, as fields of `config.ModelConfig`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

MixerName = Literal[
    "attention",
    "wide_attention",
    "shared_attention",
    "wide_shared_attention",
    "latent_attention",
    "short_conv",
    "linear_attention",
    "delta_rule",
    "mamba",
    "attention_mamba",
    "no_mixer",
]  # see model/mixers
INT4_GROUP = 32  # inputs of a matrix that share a scale of int4
# the second one has another width, or no experts
MlpName = Literal["mlp", "dense_mlp", "no_mlp"]
# see model/block.py
Residual = Literal["pre_norm", "post_norm", "both_norms", "parallel", "normed", "single", "carried"]
STREAM_PARTS: Mapping[Residual, int] = {"carried": 3}
"""Vectors of a token between layers, of residuals with more than one."""
WITHOUT_MLP_NORM: frozenset[Residual] = frozenset({"single", "carried"})
PAGED_MIXERS: frozenset[MixerName] = frozenset(
    {"attention", "wide_attention", "latent_attention", "attention_mamba"}
)
SHARED_MIXERS: Mapping[MixerName, MixerName] = {
    "shared_attention": "attention",
    "wide_shared_attention": "wide_attention",
}
"""Mixers that read the pages of an earlier layer, each with the mixer of that layer."""
STATELESS_MIXERS: frozenset[MixerName] = (
    PAGED_MIXERS - {"attention_mamba"} | SHARED_MIXERS.keys() | {"no_mixer"}
)
"""The others keep states."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embeddings. `kind` is the scaling, with the names of Hugging Face's `rope_type`."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = (
        "default"
    )
    factor: float = 1.0
    original_max_position: int = 0  # positions before scaling; 0 if the kind does not use it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: None derives it from `factor`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    # longrope, one for each frequency, up to `original_max_position`
    short_factor: tuple[float, ...] = ()
    # factor on the queries at position p: 1 + temperature * log(1 + p // original)
    temperature: float = 0.0
    share: float = 1.0  # proportional: of the frequencies, the highest ones; the others are zero
    rotated_dim: int | None = None  # first dimensions of each head, which are rotated; None: all
    # of norms without weights of what is rotated, before it; 0: there are none
    unit_eps: float = 0.0
    is_reversed: bool = False  # pairs turn the other way

    def yarn_magnitude(self, strength: float) -> float:
        """The factor of yarn for texts `factor` times as long."""
        if self.factor <= 1:
            return 1.0
        return 0.1 * strength * math.log(self.factor) + 1.0


class WideConfig(NamedTuple):
    """Attention with heads of another size or number, of the layers with the mixer wide_attention."""

    head_dim: int
    num_kv_heads: int
    keys_are_values: bool = False  # there is no projection to values
    kv_copies: int = 1  # see `ModelConfig`
    num_heads: int | None = None  # None: as many as in other layers


class SharedBlocks(NamedTuple):
    """Blocks of attention and an MLP that several layers use, each with its own addition of low rank (Zamba2).

    The residual is "carried".
    """

    num_blocks: int  # which take turns
    has_attention_additions: bool = False  # to queries, keys and values, and not to the MLP alone


class LayerInputs(NamedTuple):
    """Vectors of each token for each layer, by its id and its embedding (Gemma 3n and 4)."""

    width: int
    vocab_size: int


class LayerKind(NamedTuple):
    """The differences between the layers of a model.

    Attributes:
        window: the number of tokens in sight of each token, itself included; None: all before it.
        rope: None: there are learned positions, or none.
        mixer: the part for the mixing of tokens.
        mlp: the part behind it.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    mixer: MixerName = "attention"
    mlp: MlpName = "mlp"

    @property
    def parts(self) -> tuple[str, str]:
        """The names of the mixer and of the MLP, which are those of their parameters too."""
        return self.mixer, self.mlp


@dataclass(frozen=True)
class ShortConvConfig:
    """A convolution along the tokens of a request, in place of attention."""

    width: int  # tokens that each token sees, itself included
    has_bias: bool = False  # in the convolution and in the linear layers around it


@dataclass(frozen=True)
class DeltaRuleConfig:
    """The gated delta rule, in place of attention."""

    num_heads: int  # each with a matrix as its state
    num_key_heads: int  # of queries and keys; several heads share one
    key_dim: int
    value_dim: int
    width: int  # tokens that each token sees in the convolution of queries, keys and values

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.num_heads * self.value_dim


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2, in place of attention."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share keys and queries; results are normalised by group
    state_dim: int  # numbers of a key or query
    width: int  # tokens that each token sees in the convolutions
    has_bias: bool = False  # in the linear layers
    has_conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    # whether results are weighted before their norm
    norm: Literal["gate_first", "gate_last"] | None = "gate_first"

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all keys and queries of a token."""
        return 2 * self.num_groups * self.state_dim


@dataclass(frozen=True)
class LatentConfig:
    """Attention over latents, in place of keys and values of each head. The dimensions of a query are `head_dim`."""

    rank: int  # numbers of a latent
    rotated_dim: int  # last dimensions of a query; a key with as many is that of all heads
    value_dim: int  # numbers of a head's result
    is_interleaved: bool = True  # the two halves of a rotated pair lie side by side in checkpoints
    # width of a projection before that to queries; None: there is none
    query_rank: int | None = None
    norm_eps: float = 1e-6  # of the norms of latents, whatever the other norms of the model have


class SumFactors(NamedTuple):
    """The factors of both parts of a residual connection."""

    stream: float = 1.0
    branch: float = 1.0


class ResidualFactors(NamedTuple):
    """The factors of all residual connections of a model with the residual "normed"."""

    attention: SumFactors = SumFactors()
    linear_attention: SumFactors = SumFactors()
    mlp: SumFactors = SumFactors()


@dataclass(frozen=True)
class RouterConfig:
    """The choice of a token's experts, and their weights."""

    scores: Literal["softmax", "sigmoid", "two_softmaxes"] = "softmax"  # of the router's products
    soft_cap: float | None = None  # products p become cap * tanh(p / cap)
    has_bias: bool = False  # added to the scores for the choice alone
    groups: int = 1  # of experts, all of the same size
    used_groups: int = (
        1  # groups with the largest sums of scores; experts are chosen from these alone
    )
    best_of_group: int = 2  # scores in the sum of a group, its largest ones
    eps: float = 0.0  # added to the sum of the weights, by which they are divided
    least_sum: float = 0.0  # the least divisor of the weights
    reach: float = (
        0.0  # two_softmaxes: an expert farther from the best one, in shares of it, has no weight
    )
    scale: float = 1.0  # factor on the weights


class GateClamp(NamedTuple):
    """A gate g, at most `limit`, becomes g * sigmoid(slope * g). The vector beside it is clamped, and 1 added."""

    limit: float
    slope: float


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of MLPs. The width of an expert is `ModelConfig.mlp_dim`."""

    count: int  # experts of a layer
    per_token: int  # those that a token goes through
    # the weights of a token's experts have the sum 1, before `RouterConfig.scale`
    is_normalised: bool = True
    shared_dim: int = 0  # width of an additional expert of all tokens; 0: there is none
    has_biases: bool = False  # of the router's products and of the projections of experts
    clamp: GateClamp | None = None  # None: the activation of the gate, times the vector beside it
    # a token's weight multiplies the inputs of its only expert, and not the results
    weighs_inputs: bool = False
    shared_gate: bool = True  # each token weights it by its own number
    # width of an MLP beside the experts; both have norms, and the router reads the stream
    beside_dim: int = 0
    router: RouterConfig = RouterConfig()


@dataclass(frozen=True)
class StoredForm:
    """The form of weights that another program quantised and published; see model/published.

    Attributes:
        layout: the names of the tensors, and the order of their numbers. "scaled" has those that say everything;
            "mxfp4" has the matrices of experts alone.
        bits: of a number; with the layout "scaled" the most of a matrix, whose tensors say it.
        group_size: inputs that share a scale; 0: all. With the layout "scaled" the fewest.
        zero_offset: added to stored zero points.
        is_ordered: each input names its group.
        has_integers: there are matrices of integers, and not of floats alone.
        block: outputs and inputs of a scale, where scales are of blocks.
    """

    layout: Literal["gptq", "awq", "scaled", "mxfp4"]
    bits: int
    group_size: int = 0
    zero_offset: int = 0
    is_ordered: bool = False
    has_integers: bool = True
    block: tuple[int, int] = (128, 128)

    @property
    def is_of_experts(self) -> bool:
        """True if the matrices of experts alone have this form."""
        return self.layout == "mxfp4"
