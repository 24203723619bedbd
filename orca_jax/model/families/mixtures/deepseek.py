"""Families with latent attention: Youtu, DeepSeek V2 and V3, GLM-4.7-Flash, Mistral 4.

DeepSeek V3 and GLM have experts chosen by sigmoid scores, DeepSeek V2 and Mistral 4 the most probable ones. First
layers have none.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from orca_jax.model.families.experts import (
    GROUPED_ALIASES,
    OF_ROUTERS,
    first_layers,
    first_of_types,
    grouped_experts,
    with_router,
)
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, Fields, off, with_fields
from orca_jax.model.families.names import SIGMOID
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_bool, get_int, refusal
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LatentConfig

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL4_ROPE = RopeRules(
    kinds=("yarn",),  # with others transformers has the frequencies of whole heads, and fails
    default=_YARN,
    notes=frozenset({"max_position_embeddings"}),
    temperature_key="llama_4_scaling_beta",
)


class LatentShape(NamedTuple):
    """The shape of a Llama with latent attention.

    Attributes:
        query_rank: default of `q_lora_rank`.
        plain: default of `qk_nope_head_dim`.
        value_dim: default of `v_head_dim`.
        rank: default of `kv_lora_rank`.
        rules: the rules of rotary positions.
        is_share: `head_dim` counts all dimensions of a query, of which a share is rotated; False: the rotated ones.
    """

    query_rank: int = 1536
    plain: int = 128
    value_dim: int = 128
    rank: int = 512
    rules: RopeRules = RopeRules(kinds=("default", "yarn"))
    is_share: bool = False

    def read(self, hf: HfConfig, family: str) -> ModelConfig:
        """Read the shape; raises as `FamilyShape.read`."""
        rotated = get_int(hf, "qk_rope_head_dim", 64)
        head_dim = get_int(hf, "qk_nope_head_dim", self.plain) + rotated
        width = rotated
        rules = self.rules
        if self.is_share:
            width = head_dim
            rules = rules._replace(share=rotated / head_dim)
        shape = LlamaShape(rules=rules)
        config = shape.read(hf, family, head_dim=width)
        if config.head_dim != width:
            raise refusal("head_dim", f"must be {width}, as qk_rope_head_dim says", config.head_dim)
        if config.num_kv_heads != config.num_heads:
            raise refusal(
                "num_key_value_heads",
                f"must be num_attention_heads {config.num_heads}",
                config.num_kv_heads,
            )
        positions = config.rope
        assert positions is not None, "the shape has them"
        if (positions.rotated_dim or width) != rotated:
            problem = f"must give qk_rope_head_dim {rotated} of {width} dimensions"
            raise refusal("partial_rotary_factor", problem, positions.rotated_dim)
        scale = head_dim**-0.5
        if positions.kind == "yarn" and positions.mscale_all_dim:
            scale *= positions.yarn_magnitude(positions.mscale_all_dim) ** 2
        fields = {
            "num_kv_heads": 1,
            "head_dim": head_dim,
            "rope": replace(positions, rotated_dim=rotated),
            "attention_scale": scale,
            "mixer": "latent_attention",
            "latent": self._latent(hf, rotated),
        }
        return with_fields(config, hf, {**ATTENTION_BIASES, **fields})

    def _latent(self, hf: HfConfig, rotated: int) -> LatentConfig:
        query_rank = None
        if hf.get("q_lora_rank", self.query_rank) is not None:
            query_rank = get_int(hf, "q_lora_rank", self.query_rank)
        return LatentConfig(
            rank=get_int(hf, "kv_lora_rank", self.rank),
            rotated_dim=rotated,
            value_dim=get_int(hf, "v_head_dim", self.value_dim),
            query_rank=query_rank,
            is_interleaved=get_bool(hf, "rope_interleave", True),
        )


def _check_v2(hf: HfConfig, config: ModelConfig) -> Fields:
    """No fields; what DeepSeek V2 does not have is refused."""
    method = hf.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise refusal("topk_method", "must be greedy or group_limited_greedy", method)
    if not get_bool(hf, "rope_interleave", True):
        raise refusal("rope_interleave", "must be true", False)
    return {}


def _softmax_of_v2(hf: HfConfig, config: ModelConfig) -> Fields:
    """The most probable experts; transformers does not read `norm_topk_prob` here."""
    assert config.experts is not None, "they are read before"
    router = replace(config.experts.router, scores="softmax", has_bias=False, best_of_group=1)
    if hf.get("topk_method") != "group_limited_greedy":
        router = replace(router, groups=1, used_groups=1)
    return {"experts": replace(config.experts, router=router, is_normalised=False)}


_NAMES = (
    SIGMOID
    + """
    self_attn.kv_a_proj_with_mqa    latent.latent
    self_attn.kv_a_proj_with_mqa    latent.rotated_key      pairs
    self_attn.kv_a_layernorm        latent.latent_norm
    self_attn.kv_b_proj.weight      latent.up
    self_attn.q_a_proj              latent.query_down
    self_attn.q_a_layernorm         latent.query_norm
    self_attn.q_b_proj              latent.query            pairs
    self_attn.q_proj                only_latent.query       pairs
    self_attn.o_proj                latent.out
"""
)


def _scored(scores: str) -> Mapping[str, tuple[object, ...]]:
    return {"moe_layer_freq": (1, None), "scoring_func": (scores, None)}


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    (grouped_experts((256, 8, 2048), first_layers(3), groups=(8, 4), scale=2.5),),
    _NAMES,
    shape=LatentShape(),
    has_further_layers=True,
    fixed={**_scored("sigmoid"), "topk_method": ("noaux_tc", None)},
    aliases=GROUPED_ALIASES,
    unread=OF_ROUTERS
    + "aux_loss_alpha ep_size num_mtp_layers num_nextn_predict_layers qk_head_dim seq_aux",
)
LATENTS = (
    Family(
        "youtu", names=_NAMES, shape=LatentShape(), unread="embedding_initializer_range qk_head_dim"
    ),
    DEEPSEEK_V3,
    replace(
        DEEPSEEK_V3,
        name="glm4_moe_lite",
        shape=LatentShape(768, 192, 256),
        fields=(grouped_experts((64, 4, 1536), first_of_types(1), scale=1.8),),
    ),
    replace(
        DEEPSEEK_V3,
        name="deepseek_v2",
        fields=(
            _check_v2,
            grouped_experts((64, 6, 1407), first_layers(0), shared=2),
            _softmax_of_v2,
        ),
        fixed={**_scored("softmax"), **off("mlp_bias")},
    ),
    replace(
        DEEPSEEK_V3,
        name="mistral4",
        shape=LatentShape(1024, 64, 128, 256, rules=_MISTRAL4_ROPE, is_share=True),
        fields=(
            grouped_experts((128, 4, 2048), first_layers(0)),
            with_router(scores="softmax", has_bias=False),
        ),
        fixed=_scored("softmax"),
    ),
)
