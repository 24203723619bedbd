"""Configurations of families with experts."""

from collections.abc import Callable
from random import Random

from tests.model.recorded.configs.sizes import Config, llama, theta, windows, without


def experts(draw: Random, count: str = "num_experts") -> Config:
    """The number of experts, and of those of a token."""
    number = draw.choice((4, 6))
    return {count: number, "num_experts_per_tok": draw.choice((1, 2, 3))}


def flex_olmo(draw: Random, number: int) -> Config:
    """FlexOlmo."""
    config = without(llama(draw, number), "head_dim") | {"rope_theta": theta(draw), "intermediate_size": 12}
    return config | experts(draw) | {"norm_topk_prob": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}


def glm4_moe(draw: Random, number: int) -> Config:
    """GLM-4.5, and Solar Open and dots.llm1 with the same keys."""
    groups = 2 if number % 2 == 0 else 1
    config = llama(draw, number) | {"rope_theta": theta(draw), "attention_bias": draw.random() < 0.5, "head_dim": 8}
    return config | {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2 * groups,
        "topk_group": groups,
        "n_shared_experts": draw.choice((1, 2)),
        "routed_scaling_factor": draw.choice((1.5, 2.5)),
        "norm_topk_prob": number % 3 != 1,
        "first_k_dense_replace": draw.choice((1, 2)),
        "use_qk_norm": draw.random() < 0.5,
        "partial_rotary_factor": 0.5,
    }


def solar_open(draw: Random, number: int) -> Config:
    """Solar Open, without layers without experts."""
    return without(glm4_moe(draw, number), "first_k_dense_replace", "use_qk_norm", "partial_rotary_factor")


def dots1(draw: Random, number: int) -> Config:
    """dots.llm1, which has windows."""
    config = without(glm4_moe(draw, number), "use_qk_norm", "partial_rotary_factor")
    if number % 3 == 1:
        return config | {"sliding_window": 7, "max_window_layers": 2}
    return config | windows(draw, config)


MIXTURES: dict[str, Callable[[Random, int], Config]] = {
    maker.__name__: maker for maker in (flex_olmo, glm4_moe, solar_open, dots1)
}
