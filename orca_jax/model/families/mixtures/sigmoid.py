"""Families whose experts are chosen by sigmoid scores and a bias: GLM-4.5, Solar Open, dots.llm1.

The first layers of GLM-4.5 and dots.llm1 have no experts.
"""

from collections.abc import Mapping
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Family, Weight, rows_if, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, expert_weights
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import (
    HfConfig,
    get_bool,
    get_count,
    get_float,
    get_int,
    refusal,
)
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig

_MLP = "layers.{layer}.mlp"
GROUPED_KEYS = words(
    "moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok "
    "routed_scaling_factor topk_group"
)
"""The keys read by `grouped_experts`."""
# further layers, which are skipped
_NEXT_TOKENS = frozenset({"num_mtp_layers", "num_nextn_predict_layers"})
_ALIASES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}


def grouped_experts(
    hf: HfConfig,
    config: ModelConfig,
    defaults: tuple[int, int, int],
    *,
    num_dense: int = 0,
    is_normalised: bool = True,
    others: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """The fields for experts as in DeepSeek-V3: sigmoid scores, a bias for the choice, groups, and a shared expert.

    Args:
        hf: the configuration.
        config: the shape of the model without experts.
        defaults: number of experts, of those of a token, and width of one.
        num_dense: first layers without experts.
        is_normalised: default of `norm_topk_prob`.
        others: defaults of other keys that differ from GLM-4.5's.

    Raises:
        ConfigError: a number is wrong, or groups do not divide the experts.
    """
    count = get_int(hf, "n_routed_experts", defaults[0])
    per_token = get_int(hf, "num_experts_per_tok", defaults[1])
    width = get_int(hf, "moe_intermediate_size", defaults[2])
    others = {
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        **others,
    }
    groups = get_int(hf, "n_group", others["n_group"])
    used = get_int(hf, "topk_group", others["topk_group"])
    if count % groups or used > groups or (groups > 1 and count < 2 * groups):
        raise refusal(
            "n_group",
            f"must divide the {count} experts into groups of two or more, at least {used}",
            groups,
        )
    if per_token > count // groups * used:
        raise refusal("num_experts_per_tok", f"must be at most {count // groups * used}", per_token)
    if num_dense >= config.num_layers:
        raise refusal(
            "first_k_dense_replace", f"must be less than the {config.num_layers} layers", num_dense
        )
    router = RouterConfig(
        "sigmoid",
        has_bias=True,
        groups=groups,
        used_groups=used,
        eps=1e-20,
        scale=get_float(hf, "routed_scaling_factor", others["routed_scaling_factor"]),
    )
    experts = ExpertsConfig(
        count,
        per_token,
        get_bool(hf, "norm_topk_prob", is_normalised),
        get_count(hf, "n_shared_experts", others["n_shared_experts"]) * width,
        shared_gate=False,
        router=router,
        dense_layers=tuple(range(num_dense)),
        dense_dim=config.mlp_dim if num_dense else 0,
    )
    return {"mlp_dim": width, "experts": experts}


def dense_layers_first(hf: HfConfig, num_layers: int, default: int) -> int:
    """The number of first layers without experts, by `mlp_layer_types`.

    Raises:
        ConfigError: other layers have none.
    """
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        return default
    number = 0
    if isinstance(kinds, list):
        number = kinds.count("dense")
    if kinds != ["dense"] * number + ["sparse"] * (num_layers - number):
        raise refusal(
            "mlp_layer_types",
            f"must be dense for the first of {num_layers} layers, then sparse",
            kinds,
        )
    return number


def mixture_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The weights of experts, of their router, of the shared one and of the layers without experts."""
    experts = config.experts
    assert experts is not None, "the families of this file have experts"
    bias = Weight(f"{_MLP}.gate.e_score_correction_bias", "blocks.mlp.choice_bias")
    shared = llama.mlp_weights(f"{_MLP}.shared_experts", "blocks.mlp.shared.mlp", bias=False)
    dense = llama.mlp_weights(_MLP, "blocks.dense_mlp", bias=False)
    return (
        *expert_weights(_MLP, width=config.mlp_dim),
        *rows_if(experts.router.has_bias, bias),
        *rows_if(experts.shared_dim, *shared),
        *rows_if(experts.dense_layers, *dense),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    return *llama.weights_beside_mlp(config), *mixture_weights(config)


def _glm4_moe(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    num_dense = get_count(hf, "first_k_dense_replace", 1)
    return {
        **grouped_experts(hf, config, (128, 8, 1408), num_dense=num_dense),
        "attention_bias": get_bool(hf, "attention_bias", False),
        "qk_norm": "head" if get_bool(hf, "use_qk_norm", False) else None,
    }


def _solar_open(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    found = grouped_experts(hf, config, (128, 8, 1280))
    return {**found, "attention_bias": get_bool(hf, "attention_bias", False)}


def _dots1(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    num_dense = get_count(hf, "first_k_dense_replace", 0)
    first = get_count(hf, "max_window_layers", 62)
    layers = config.num_layers
    pattern = tuple(
        hf.get("sliding_window", 4096) is not None and layer >= first for layer in range(layers)
    )
    return {
        **grouped_experts(hf, config, (128, 6, 1408), num_dense=num_dense, is_normalised=False),
        **llama.attention_biases(hf),
        **windows_of_pattern(hf, layers, config.max_positions, pattern)._asdict(),
        "qk_norm": "head",
    }


GLM4_MOE = near_llama(
    "glm4_moe",
    "GLM-4.5 and 4.6, GLM-4.5-Air",
    "Glm4Moe",
    LlamaShape(1e-5, rules=RopeRules(share=0.5)),
    _glm4_moe,
    GROUPED_KEYS | {"attention_bias", "first_k_dense_replace", "use_qk_norm"},
    weights,
    aliases=_ALIASES,
    harmless=HARMLESS | _NEXT_TOKENS,
    has_further_layers=True,
)
SOLAR_OPEN = near_llama(
    "solar_open",
    "Solar Open",
    "SolarOpen",
    LlamaShape(1e-5, rules=RopeRules(theta=1e6)),
    _solar_open,
    GROUPED_KEYS | {"attention_bias"},
    weights,
    aliases=_ALIASES,
    harmless=HARMLESS | {"first_k_dense_replace", "use_qk_norm"},  # not read by transformers either
)
DOTS1 = near_llama(
    "dots1",
    "dots.llm1",
    "Dots1",
    LlamaShape(),
    _dots1,
    GROUPED_KEYS
    | words("attention_bias first_k_dense_replace layer_types max_window_layers sliding_window"),
    weights,
    aliases=_ALIASES,
    harmless=HARMLESS | _NEXT_TOKENS,
)
SIGMOID: tuple[Family, ...] = (GLM4_MOE, SOLAR_OPEN, DOTS1)
