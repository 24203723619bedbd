"""gpt-oss: sinks of attention, windows in every other layer, and experts with biases and clamped gates.

The published files hold the experts in MXFP4. The library in C multiplies them (`published/mxfp4.py`); elsewhere they
become plain weights while loading (`files/expert_stacks.py`).
"""

from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import JoinedPart, Weight, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, read_experts
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_bool, get_float, refusal
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import GateClamp

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    stored = hf.get("quantization_config")
    if stored is not None and not (
        isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"
    ):
        raise refusal(
            "quantization_config", "must be absent or have the quant_method mxfp4", stored
        )
    bias = get_bool(hf, "attention_bias", True)
    experts = read_experts(hf, "num_local_experts", (128, 4), is_normalised=True)
    clamp = GateClamp(get_float(hf, "swiglu_limit", 7.0), get_float(hf, "swiglu_alpha", 1.702))
    windows = windows_of_pattern(hf, config.num_layers, config.max_positions, (True, False), 128)
    return {
        **windows._asdict(),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_sinks": True,
        "experts": replace(experts, has_biases=True, clamp=clamp),
    }


def _weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. Columns of gates and of the vectors beside them take turns."""
    mlp, ours = "layers.{layer}.mlp", "blocks.mlp"
    rows = []
    for index, name in enumerate(("gate", "up")):
        part = JoinedPart(index, (1, 1), config.mlp_dim)
        rows += [
            Weight(f"{mlp}.experts.gate_up_proj[{{expert}}]", f"{ours}.{name}", part=part),
            Weight(f"{mlp}.experts.gate_up_proj_bias", f"{ours}.biases.{name}", part=part),
        ]
    return (
        *llama.weights_beside_mlp(config),
        Weight("layers.{layer}.self_attn.sinks", "blocks.attention.sinks"),
        Weight(f"{mlp}.router.weight", f"{ours}.router", transpose=True),
        Weight(f"{mlp}.router.bias", f"{ours}.router_bias"),
        *rows,
        Weight(f"{mlp}.experts.down_proj[{{expert}}]", f"{ours}.down"),
        Weight(f"{mlp}.experts.down_proj_bias", f"{ours}.biases.down"),
    )


GPT_OSS = near_llama(
    "gpt_oss",
    "gpt-oss-20b and 120b",
    "GptOss",
    LlamaShape(1e-5, rules=RopeRules(theta=150000.0, default=_YARN)),
    _fields,
    words(
        "attention_bias layer_types num_experts_per_tok num_local_experts quantization_config sliding_window "
        "swiglu_alpha swiglu_limit"
    ),
    _weights,
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    harmless=HARMLESS | {"initial_context_length"},
)
