"""Qwen2, Qwen2.5 and Qwen3, without experts: Llama with biases of queries, keys and values, or with norms of heads."""

from orca_jax.model.families import llama
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.windows import QWEN_KEYS, windows_of_qwen

QWEN2 = near_llama(
    "qwen2",
    "Qwen2, Qwen2.5",
    "Qwen2",
    LlamaShape(),
    lambda hf, config: {
        "attention_bias": True,
        **windows_of_qwen(hf, config.num_layers, config.max_positions)._asdict(),
    },
    QWEN_KEYS,
    fixed={"use_mrope": (False, None)},
)
QWEN3 = near_llama(
    "qwen3",
    "Qwen3 without experts",
    "Qwen3",
    LlamaShape(),
    lambda hf, config: {
        **llama.attention_biases(hf),
        "qk_norm": "head",
        **windows_of_qwen(hf, config.num_layers, config.max_positions)._asdict(),
    },
    QWEN_KEYS | {"attention_bias"},
)
