"""gpt-oss: sinks of attention, windows in every other layer, and experts with biases and clamped gates.

The published files hold the experts in MXFP4, whose bits are kept (`published/mxfp4.py`).
"""

from orca_jax.model.families.experts import OF_ROUTERS, Mixture
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import Fields, attention_biases
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_float, refusal
from orca_jax.model.families.windows import windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import GateClamp, StoredForm

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _stored(hf: HfConfig, config: ModelConfig) -> Fields:
    """The form of the experts in the files; that of others is refused."""
    stored = hf.get("quantization_config")
    is_mxfp4 = isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"
    if stored is not None and not is_mxfp4:
        raise refusal(
            "quantization_config", "must be absent or have the quant_method mxfp4", stored
        )
    if stored is None:
        return {}
    return {"stored": StoredForm("mxfp4", bits=4, group_size=32, has_integers=False)}


def _experts(hf: HfConfig, config: ModelConfig) -> Fields:
    clamp = GateClamp(get_float(hf, "swiglu_limit", 7.0), get_float(hf, "swiglu_alpha", 1.702))
    options = {"has_biases": True, "clamp": clamp}
    return Mixture("num_local_experts", (128, 4), options=options)(hf, config)


GPT_OSS = Family(
    "gpt_oss",
    (
        _stored,
        attention_biases(default=True),
        _experts,
        windows((True, False), 128),
        {"attention_sinks": True},
    ),
    # columns of gates and of the vectors beside them take turns
    """
    self_attn.sinks                         attention.sinks
    mlp.router                              experts.router
    mlp.router.bias                         experts.router_bias
    mlp.experts.gate_up_proj[{expert}]      experts.{gate,up}           in_out by=columns
    mlp.experts.gate_up_proj_bias           experts.biases.{gate,up}    by=columns
    mlp.experts.down_proj[{expert}]         experts.down                in_out
    mlp.experts.down_proj_bias              experts.biases.down
    """,
    shape=LlamaShape(rules=RopeRules(default=_YARN)),
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    unread=OF_ROUTERS + "initial_context_length",
)
