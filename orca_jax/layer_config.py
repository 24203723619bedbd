"""The sizes and options of the parts of a layer, as fields of `config.ModelConfig`."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


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
class RouterConfig:
    """The choice of a token's experts, and their weights."""

    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router's products
    has_bias: bool = False  # added to the scores for the choice alone
    groups: int = 1  # of experts; only those of the best groups are chosen from
    used_groups: int = 1  # the best ones, by the sum of their two best scores
    eps: float = 0.0  # added to the sum by which weights are divided
    scale: float = 1.0  # factor on the weights


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of MLPs. The width of an expert is `ModelConfig.mlp_dim`."""

    count: int  # experts of a layer
    per_token: int  # those that a token goes through
    is_normalised: bool = True  # the weights of a token's experts have the sum 1, before `RouterConfig.scale`
    shared_dim: int = 0  # width of an additional expert of all tokens; 0: there is none
    shared_gate: bool = True  # each token weights it by its own number
    router: RouterConfig = RouterConfig()
    dense_layers: tuple[int, ...] = ()  # layers with an MLP in place of experts
    dense_dim: int = 0  # width of these MLPs
