"""A small model of K-quants: the shape, the tokenizer and the template of the demo, with random matrices."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from orca_jax.model.describe import read_model_config
from tests.model.gguf.test_few_bits import random_blocks
from tests.project.source import ROOT

DEMO = ROOT / "checkpoints" / "demo"
KINDS = {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q5_K"}
"""The types of a mixture; all other matrices are Q4_K."""
MOST = {"Q4_K": 1e-3, "Q5_K": 5e-4, "Q6_K": 2e-4}  # of scales, so that logits are a few units


def write_k_quants(path: Path) -> Path:
    """Write the file. Returns its path."""
    config = read_model_config(DEMO)
    width = config.embed_dim
    heads = config.num_heads * config.head_dim
    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    shapes = {"token_embd": (config.vocab_size, width), "output_norm": (width,)}
    for layer in range(config.num_layers):
        block = {
            **dict.fromkeys(("attn_q", "attn_k", "attn_v"), (heads, width)),
            "attn_output": (width, heads),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (config.mlp_dim, width)),
            "ffn_down": (width, config.mlp_dim),
            **dict.fromkeys(("attn_norm", "ffn_norm"), (width,)),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (config.head_dim,)),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        kind = KINDS.get(name.split(".")[-1], "Q4_K")
        blocks = random_blocks(kind, *shape, most=MOST[kind])
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
