"""Families with latent attention: Youtu, DeepSeek V2 and V3, GLM-4.7-Flash, Mistral 4.

DeepSeek V3 and GLM have experts chosen by sigmoid scores, DeepSeek V2 and Mistral 4 the most probable ones. First
layers have none.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import Family, JoinedPart, Weight, linear, words
from orca_jax.model.families.experts import HARMLESS
from orca_jax.model.families.mixtures.sigmoid import (
    GROUPED_KEYS,
    dense_layers_first,
    grouped_experts,
    mixture_weights,
)
from orca_jax.model.families.sizes import SIZES
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LatentConfig

_KEYS = llama.KEYS | words(
    "attention_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave v_head_dim"
)
_ROPE = rope.RopeRules(kinds=("default", "yarn"))


class LatentDefaults(NamedTuple):
    """Defaults of `q_lora_rank`, `qk_nope_head_dim`, `v_head_dim` and `kv_lora_rank`."""

    query_rank: int = 1536
    plain: int = 128
    value_dim: int = 128
    rank: int = 512


_DEFAULTS = LatentDefaults()


def youtu_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Youtu; raises `ConfigError` as `llama.config_from_hf` does."""
    config = read_latents(hf, "youtu")
    return replace(config, tied_embeddings=get_bool(hf, "tie_word_embeddings", True))


def deepseek_v3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of DeepSeek V3; raises `ConfigError` as `llama.config_from_hf` does."""
    config = read_latents(hf, "deepseek_v3")
    num_dense = get_count(hf, "first_k_dense_replace", 3)
    others = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    return replace(
        config, **grouped_experts(hf, config, (256, 8, 2048), num_dense=num_dense, others=others)
    )


def glm4_moe_lite_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of GLM-4.7-Flash; raises `ConfigError` as `llama.config_from_hf` does."""
    config = read_latents(hf, "glm4_moe_lite", LatentDefaults(768, 192, 256), norm_eps=1e-5)
    num_dense = dense_layers_first(hf, config.num_layers, 1)
    others = {"routed_scaling_factor": 1.8}
    return replace(
        config, **grouped_experts(hf, config, (64, 4, 1536), num_dense=num_dense, others=others)
    )


def deepseek_v2_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of DeepSeek V2; raises `ConfigError` as `llama.config_from_hf` does."""
    config = read_latents(hf, "deepseek_v2")
    method = hf.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise refusal("topk_method", "must be greedy or group_limited_greedy", method)
    if not get_bool(hf, "rope_interleave", True):
        raise refusal("rope_interleave", "must be true", False)
    num_dense = get_count(hf, "first_k_dense_replace", 0)
    found = grouped_experts(
        hf, config, (64, 6, 1407), num_dense=num_dense, others={"n_shared_experts": 2}
    )
    experts = found["experts"]
    router = replace(experts.router, scores="softmax", has_bias=False, best_of_group=1)
    if method != "group_limited_greedy":
        router = replace(router, groups=1, used_groups=1)
    # transformers does not read `norm_topk_prob` here.
    return replace(
        config, **found | {"experts": replace(experts, router=router, is_normalised=False)}
    )


def read_latents(
    hf: HfConfig,
    family: str,
    defaults: LatentDefaults = _DEFAULTS,
    *,
    norm_eps: float = 1e-6,
    rules: rope.RopeRules = _ROPE,
    is_share: bool = False,
) -> ModelConfig:
    """Read the keys of a model with latent attention, beside those of its MLPs.

    Args:
        hf: the configuration.
        family: name of the family.
        defaults: those of sizes.
        norm_eps: default of `rms_norm_eps`.
        rules: those of rotary positions.
        is_share: `head_dim` counts all dimensions of a query, of which a share is rotated; False: the rotated ones.

    Raises:
        ConfigError: as in `llama.config_from_hf`.
    """
    rotated = get_int(hf, "qk_rope_head_dim", 64)
    head_dim = get_int(hf, "qk_nope_head_dim", defaults.plain) + rotated
    width = rotated
    if is_share:
        width = head_dim
        rules = rules._replace(share=rotated / head_dim)
    sizes = {**SIZES[family], "head_dim": width}
    config = llama.read_shape(hf, family, defaults=sizes, norm_eps=norm_eps, rules=rules)
    if config.head_dim != width:
        raise refusal("head_dim", f"must be {width}, as qk_rope_head_dim says", config.head_dim)
    if config.num_kv_heads != config.num_heads:
        raise refusal(
            "num_key_value_heads",
            f"must be num_attention_heads {config.num_heads}",
            config.num_kv_heads,
        )
    positions = config.rope
    assert positions is not None, "read_shape reads them"
    if (positions.rotated_dim or width) != rotated:
        problem = f"must give qk_rope_head_dim {rotated} of {width} dimensions"
        raise refusal("partial_rotary_factor", problem, positions.rotated_dim)
    scale = head_dim**-0.5
    if positions.kind == "yarn" and positions.mscale_all_dim:
        scale *= positions.yarn_magnitude(positions.mscale_all_dim) ** 2
    query_rank = None
    if hf.get("q_lora_rank", defaults.query_rank) is not None:
        query_rank = get_int(hf, "q_lora_rank", defaults.query_rank)
    latent = LatentConfig(
        rank=get_int(hf, "kv_lora_rank", defaults.rank),
        rotated_dim=rotated,
        value_dim=get_int(hf, "v_head_dim", defaults.value_dim),
        query_rank=query_rank,
        is_interleaved=get_bool(hf, "rope_interleave", True),
    )
    return replace(
        config,
        **llama.attention_biases(hf),
        num_kv_heads=1,
        head_dim=head_dim,
        rope=replace(positions, rotated_dim=rotated),
        attention_scale=scale,
        mixer_pattern=("latent_attention",),
        latent=latent,
    )


def attention_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The weights of attention, with their norms."""
    latent = config.latent
    bias = config.attention_bias
    assert latent is not None, "the family has latents"
    theirs, ours = "layers.{layer}.self_attn", "blocks.latent_attention"
    rotated = latent.rotated_dim
    sizes = (latent.rank, latent.rotated_dim)

    def pairs(first: int) -> tuple[int, int]:
        if latent.is_interleaved:
            return (first, first + rotated)
        return (0, 0)

    query = JoinedPart(0, (config.head_dim,), config.num_heads, pairs(config.head_dim - rotated))
    parts = {"latent": JoinedPart(0, sizes), "rotated_key": JoinedPart(1, sizes, pairs=pairs(0))}
    rows: list[Weight] = []
    for name, part in parts.items():
        rows += [
            replace(row, part=part)
            for row in linear(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.{name}", bias=bias)
        ]
    key = "q_proj"
    if latent.query_rank is not None:
        key = "q_b_proj"
        rows += linear(f"{theirs}.q_a_proj", f"{ours}.query_down", bias=bias)
        rows += [Weight(f"{theirs}.q_a_layernorm.weight", f"{ours}.query_norm.scale")]
    return (
        *rows,
        Weight(f"{theirs}.{key}.weight", f"{ours}.query.kernel", transpose=True, part=query),
        Weight(f"{theirs}.kv_a_layernorm.weight", f"{ours}.latent_norm.scale"),
        Weight(f"{theirs}.kv_b_proj.weight", f"{ours}.up"),
        *linear(f"{theirs}.o_proj", f"{ours}.out", bias=config.attention_out_bias),
    )


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters, of models with experts."""
    return *llama.outer_weights(config), *attention_weights(config), *mixture_weights(config)


def youtu_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=False)
    return *llama.outer_weights(config), *attention_weights(config), *mlp


YOUTU = Family(
    name="youtu",
    models="Youtu-LLM",
    config_from_hf=youtu_from_hf,
    keys=_KEYS,
    architectures=("YoutuForCausalLM", "YoutuModel"),
    weights=youtu_weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    harmless=frozenset({"embedding_initializer_range", "qk_head_dim"}),
)


_UNREAD = words(
    "aux_loss_alpha ep_size num_mtp_layers num_nextn_predict_layers qk_head_dim seq_aux"
)


def with_latent_experts(
    name: str, models: str, prefix: str, read: Callable[[HfConfig], ModelConfig], **options: Any
) -> Family:
    """A family with experts; `options` are its `scores`, and its own `keys` and `fixed` ones."""
    return Family(
        name=name,
        models=models,
        config_from_hf=read,
        keys=(_KEYS | GROUPED_KEYS | options["keys"]) - frozenset(options["fixed"]),
        architectures=(f"{prefix}ForCausalLM", f"{prefix}Model"),
        weights=weights,
        prefixes=llama.PREFIXES,
        ignored=llama.IGNORED,
        has_further_layers=True,
        fixed={
            "moe_layer_freq": (1, None),
            "scoring_func": (options["scores"], None),
            **options["fixed"],
        },
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        harmless=HARMLESS | _UNREAD,
    )


DEEPSEEK_V2 = with_latent_experts(
    "deepseek_v2",
    "DeepSeek-V2 and V2-Lite",
    "DeepseekV2",
    deepseek_v2_from_hf,
    keys=frozenset({"first_k_dense_replace", "topk_method"}),
    scores="softmax",
    fixed={"mlp_bias": (False, None)},
)
DEEPSEEK_V3 = with_latent_experts(
    "deepseek_v3",
    "DeepSeek-V3, V3.1 and R1",
    "DeepseekV3",
    deepseek_v3_from_hf,
    keys=frozenset({"first_k_dense_replace"}),
    scores="sigmoid",
    fixed={"topk_method": ("noaux_tc", None)},
)
GLM4_MOE_LITE = with_latent_experts(
    "glm4_moe_lite",
    "GLM-4.7-Flash",
    "Glm4MoeLite",
    glm4_moe_lite_from_hf,
    keys=frozenset({"mlp_layer_types"}),
    scores="sigmoid",
    fixed={"topk_method": ("noaux_tc", None)},
)
