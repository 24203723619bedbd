"""The sizes and options of the parts of a layer, as fields of `config.ModelConfig`."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ShortConvConfig:
    """A convolution along the tokens of a request, in place of attention."""

    width: int  # tokens that each token sees, itself included
    has_bias: bool = False  # in the convolution and in the linear layers around it


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
class ExpertsConfig:
    """A mixture of experts in place of each MLP. The width of an expert is `ModelConfig.mlp_dim`."""

    count: int  # experts of a layer
    per_token: int  # those that a token goes through
    is_normalised: bool = True  # the weights of a token's experts have the sum 1
    shared_dim: int = 0  # width of an additional expert of all tokens; 0: there is none
