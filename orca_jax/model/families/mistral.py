"""Mistral: Llama with a sliding window in all layers. Ministral has it in some.

Ministral 3 has none, and multiplies queries by a factor that grows with their positions.
"""

from typing import Any

from orca_jax.model.families import rope
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import window_of_all, windows_of_pattern
from orca_jax.values.config import ModelConfig

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_TEMPERED = rope.RopeRules(
    default=_YARN,
    notes=frozenset({"max_position_embeddings"}),
    temperature_key="llama_4_scaling_beta",
)
_WINDOW = frozenset({"sliding_window"})


def _ministral(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    pattern = (hf.get("sliding_window", 4096) is not None,)
    return windows_of_pattern(hf, config.num_layers, config.max_positions, pattern)._asdict()


MISTRAL = near_llama(
    "mistral",
    "Mistral 7B, Mistral Nemo, Mistral Small 2409 and 2501",
    "Mistral",
    LlamaShape(),
    lambda hf, config: {"sliding_window": window_of_all(hf, 4096, config.max_positions)},
    _WINDOW,
)
MINISTRAL = near_llama(
    "ministral", "Ministral 8B", "Ministral", LlamaShape(), _ministral, _WINDOW | {"layer_types"}
)
MINISTRAL3 = near_llama(
    "ministral3",
    "Ministral 3",
    "Ministral3",
    LlamaShape(1e-5, rules=_TEMPERED),
    lambda hf, config: {"sliding_window": window_of_all(hf, None, config.max_positions)},
    _WINDOW,
)
