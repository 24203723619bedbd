"""Models with states for compilation: with the sizes of published ones, and small ones."""

from typing import Any

from orca_jax.model.describe import config_from_hf

_FULL = "full_attention"
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 4,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "small LFM3": {
        "model_type": "lfm3",
        **_SMALL,
        "layer_types": ["conv", _FULL, "conv", "sliding_attention"],
    },
    "small MiniMax": {"model_type": "minimax", **_SMALL, "num_local_experts": 4},
    "LFM3": {"model_type": "lfm3"},
}
HYBRIDS = {name: config_from_hf(config) for name, config in _CONFIGS.items()}
NUM_STATES = {name: 16384 if name == "small LFM3" else 4096 if name == "LFM3" else 512 for name in HYBRIDS}
"""Blocks, so that the states of a layer are much more than those of 64 rows, and do not fit into VMEM."""
SMALL = tuple(name for name in HYBRIDS if name.startswith("small"))
