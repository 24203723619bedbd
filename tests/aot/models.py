"""Models for compilation: with the sizes of published ones, and small ones with states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.kernels.linear_state import LinearTokens
from orca_jax.kernels.state_rows import StateRows
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
    # OpenAI's model card of gpt-oss (arXiv 2508.10925), table 1; the rest are the defaults of GptOssConfig.
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    # gemma/gm/nn/gemma4/_gemma4.py of google-deepmind/gemma.
    "Gemma 4 E4B": {
        "model_type": "gemma4_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
    },
    # The defaults of Qwen3_5TextConfig in transformers 5.23, "a model from the Qwen3.5-9B style configuration".
    "Qwen3.5 9B": {"model_type": "qwen3_5_text"},
    # config.json of deepseek-ai/DeepSeek-V2-Lite.
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
}
MODELS = {name: config_from_hf(config) for name, config in _CONFIGS.items()}
_STATES = {"small LFM3": 16384, "small MiniMax": 512, "LFM3": 4096, "Qwen3.5 9B": 128}
NUM_STATES = {name: _STATES.get(name, 0) for name in MODELS}
"""Blocks, so that the states of a layer are much more than those of 64 rows, and do not fit into VMEM."""
PUBLISHED = {
    "gpt-oss-20b": {"v5e": 4, "v6e": 2, "H200": 1},
    "Gemma 4 E4B": {"v5e": 2, "v6e": 1, "H200": 1},
    "Qwen3.5 9B": {"v5e": 2, "v6e": 1, "H200": 1},
    "DeepSeek-V2-Lite": {"v5e": 4, "v6e": 2, "H200": 1},
}
"""The fewest chips that hold the weights in bfloat16: a v5e has 16 GB, a v6e 32 GB, an H200 141 GB."""
SMALL = tuple(name for name in MODELS if name.startswith("small"))


class StateSizes(NamedTuple):
    """The sizes of linear attention in a layer."""

    name: str
    heads: int
    keys: int
    values: int
    has_beta: bool = False
    pairs: int | None = None  # queries and keys, if heads share them

    def arguments(self, rows: int, tokens: int) -> tuple[LinearTokens, Any, StateRows]:
        """The shapes of a call, with twice as many states as rows."""

        def floats(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        numbers = floats(tokens, self.heads)
        keys = floats(tokens, self.pairs or self.heads, self.keys)
        values = floats(*numbers.shape, self.values)
        beta = numbers if self.has_beta else None
        states = floats(2 * rows, self.heads, self.keys, self.values)
        index: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
        is_fresh: Any = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        given = StateRows(index, index, index, index, is_fresh)
        return LinearTokens(keys, keys, values, numbers, beta), states, given


DELTA_RULE = StateSizes("delta rule of Qwen3.5 9B", 32, 128, 128, has_beta=True, pairs=16)
STATE_SIZES = (
    DELTA_RULE,
    StateSizes("lightning attention, 64 heads of 128", 64, 128, 128),
    StateSizes("Mamba-2, 128 heads of 64", 128, 128, 64, pairs=8),
    StateSizes("Mamba-2, 24 heads of 64, 256 keys", 24, 256, 64, pairs=1),
)
