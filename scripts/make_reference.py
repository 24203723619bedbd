"""Creates the small models of the tests that compare with transformers, or verifies the existing ones.

    python scripts/make_reference.py [--verify | --embeddings] [--out tests/fixtures/reference] [NAME ...]

Needs torch, transformers and safetensors, in an environment of their own: neither the package nor its tests use them.
Each folder is a Hugging Face directory with random weights and `expected.npz`. This file has the ids of every prompt
(`ids_n`), and the answers to them (recorded_answers.py).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from recorded_answers import (
    answers,
    is_same,
    make_parser,
    read_model,
    read_prompts,
    record,
    run,
    set_up_torch,
)

PROMPT_LENGTHS = (1, 5, 17, 33)
MARGIN = 5e-3
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EMBEDDED = ("gpt2-12-heads", "llama-12-heads-3-groups", "gemma2")  # models with recorded embeddings


@dataclass(frozen=True)
class Case:
    """A model: its family, its configuration and the size of its files."""

    family: str
    options: Mapping[str, Any]
    shard_size: str = "100MB"
    extra: Mapping[str, Any] = field(default_factory=dict)  # options on top, such as a kind of rope


def gpt2(heads: int, head_dim: int, layers: int, vocab: int, **options: Any) -> Case:
    """A GPT-2 of a given shape. End tokens are off: every prompt generates the same number of tokens."""
    embed = heads * head_dim
    shape = {
        "n_head": heads,
        "n_embd": embed,
        "n_inner": 2 * embed,
        "n_layer": layers,
        "vocab_size": vocab,
    }
    shape["n_positions"] = 64
    return Case("gpt2", {**shape, "bos_token_id": None, "eos_token_id": None, **options})


def llama(
    heads: int, kv_heads: int, head_dim: int, layers: int, vocab: int, **options: Any
) -> Case:
    """A Llama of a given shape, also without end tokens."""
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * 4,
        "intermediate_size": heads * 8,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
    }
    return Case("llama", {**shape, "bos_token_id": None, "eos_token_id": None, **options})


def like_llama(family: str, **options: Any) -> Case:
    """A small model with the keys of Llama: two layers, four heads, two groups."""
    shape = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    }
    return Case(family, {**shape, **NO_TOKENS, **options})


def neox(**options: Any) -> Case:
    """A small GPT-NeoX, half of each head rotated."""
    shape = {
        "num_attention_heads": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "rotary_pct": 0.5,
    }
    return Case("gpt_neox", {**shape, **NO_TOKENS, **options})


def opt(**options: Any) -> Case:
    """A small OPT."""
    shape = {
        "num_attention_heads": 4,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    }
    return Case("opt", {**shape, **NO_TOKENS, **options})


def gemma3(layers: int, **options: Any) -> Case:
    """A small Gemma 3, narrow because its period of six layers needs many of them."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "query_pre_attn_scalar": 10,
    }
    return like_llama("gemma3_text", **shape, **options)


def with_images(texts: Case) -> Case:
    """A Gemma 3 for images and texts, whose part for images is as small as possible."""
    vision = {
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    parts = {
        "text_config": {**texts.options, "initializer_range": 0.2},
        "vision_config": {**vision, "image_size": 4, "patch_size": 2},
    }
    tokens = {
        "boi_token_index": 90,
        "eoi_token_index": 91,
        "image_token_index": 92,
        "mm_tokens_per_image": 4,
    }
    return Case("gemma3", {**parts, **tokens, **NO_TOKENS})


def stretched(**rope: Any) -> Case:
    """A small Llama with a kind of rope and a short original context, so that the kind matters."""
    parameters = {"rope_theta": 10000.0, **rope}
    return llama(2, 1, 16, 2, 97, rope_parameters=parameters)


CASES: Mapping[str, Case] = {
    "gpt2-12-heads": gpt2(12, 4, 3, 211, n_inner=None),
    "gpt2-25-heads": gpt2(25, 2, 2, 97),
    "gpt2-untied-sharded": Case(
        "gpt2",
        {**gpt2(4, 12, 2, 131, tie_word_embeddings=False, n_inner=80).options},
        shard_size="60KB",
    ),
    "llama-12-heads-3-groups": llama(12, 4, 8, 2, 211),
    "llama-25-heads": llama(25, 5, 4, 2, 97, tie_word_embeddings=True),
    "llama-biases-sharded": Case(
        "llama",
        {**llama(6, 2, 16, 3, 131, attention_bias=True, mlp_bias=True).options},
        shard_size="60KB",
    ),
    "llama-rope-linear": stretched(rope_type="linear", factor=4.0),
    "llama-rope-dynamic": stretched(rope_type="dynamic", factor=2.0),
    "llama-rope-llama3": stretched(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama-rope-yarn": stretched(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=4.0,
        beta_slow=1.0,
    ),
    "llama-rope-yarn-mscale": stretched(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=0.7,
        mscale_all_dim=1.0,
        truncate=False,
    ),
    "llama-rope-longrope": stretched(
        rope_type="longrope",
        original_max_position_embeddings=48,
        short_factor=[1.0 + 0.25 * i for i in range(8)],
        long_factor=[2.0 + 0.5 * i for i in range(8)],
    ),
    "llama-smollm-9-heads": llama(9, 3, 4, 2, 97, tie_word_embeddings=True),
    "qwen2-tied": like_llama("qwen2", tie_word_embeddings=True),
    "qwen2-window": like_llama(
        "qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=7
    ),
    "mistral-window": like_llama("mistral", sliding_window=10, head_dim=16),
    "qwen3": like_llama("qwen3", head_dim=16, tie_word_embeddings=True),
    "phi3-window": like_llama("phi3", sliding_window=12, partial_rotary_factor=0.5),
    "phi3-longrope": like_llama(
        "phi3",
        original_max_position_embeddings=48,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.25 * i for i in range(4)],
            "long_factor": [2.0 + 0.5 * i for i in range(4)],
        },
    ),
    "olmo2": like_llama("olmo2"),
    "mixtral": like_llama(
        "mixtral",
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=10,
        intermediate_size=24,
    ),
    "qwen3_moe": like_llama(
        "qwen3_moe", head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12
    ),
    "qwen3_moe-normalised": like_llama(
        "qwen3_moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "qwen2_moe": like_llama(
        "qwen2_moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    "olmoe": like_llama("olmoe", num_experts=6, num_experts_per_tok=2, intermediate_size=12),
    "qwen2-mixed-windows": like_llama(
        "qwen2", num_hidden_layers=3, use_sliding_window=True, max_window_layers=1, sliding_window=7
    ),
    "qwen3-mixed-windows": like_llama(
        "qwen3",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma2": like_llama(
        "gemma2",
        num_hidden_layers=3,
        head_dim=12,
        sliding_window=6,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
    ),
    "gemma2-untied": like_llama(
        "gemma2",
        num_attention_heads=6,
        num_key_value_heads=6,
        hidden_size=24,
        head_dim=8,
        tie_word_embeddings=False,
        attention_bias=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": gemma3(
        8, num_attention_heads=4, num_key_value_heads=2, head_dim=12, sliding_window=5
    ),
    "gemma3-one-kv-head": gemma3(
        4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=6,
        sliding_window=9,
        sliding_window_pattern=2,
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma3-with-images": with_images(
        gemma3(2, head_dim=6, sliding_window=5, sliding_window_pattern=2)
    ),
    "gpt_neox-parallel": neox(),
    "gpt_neox-sequential": neox(use_parallel_residual=False, rotary_pct=1.0),
    "opt": opt(),
}


def build(case: Case, seed: int) -> Any:
    """The model with random weights, wide enough to make all positions differ."""
    torch.manual_seed(seed)
    kind = transformers.CONFIG_MAPPING[case.family]
    std = "init_std" if case.family == "opt" else "initializer_range"
    config = kind(**case.options, **{std: 0.2}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # these start as zeros and ones
            if name.endswith("bias") or "norm" in name or ".ln_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def attempt(case: Case, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    """The model of a seed, its random prompts, and its answers to them."""
    model = build(case, seed)
    random = np.random.default_rng(seed)
    vocab = model.config.get_text_config().vocab_size
    prompts = [random.integers(0, vocab, length) for length in PROMPT_LENGTHS]
    ids = {f"ids_{number}": prompt.astype(np.int32) for number, prompt in enumerate(prompts)}
    return model, {**ids, **answers(model, prompts)}


def make(name: str, directory: Path) -> None:
    """Write the model of the first seed with wide margins."""
    case = CASES[name]

    def save(model: Any) -> None:
        model.save_pretrained(directory, max_shard_size=case.shard_size)

    record(name, directory, partial(attempt, case), save, MARGIN)


def verify(name: str, directory: Path) -> bool:
    """Read the model back, run it on the same prompts, and compare."""
    return is_same(name, directory, answers(read_model(directory), read_prompts(directory)))


@torch.no_grad()
def embed(out: Path) -> None:
    """Write the hidden vectors after the last norm, of the last token and their mean, beside the folder `out`."""
    expected: dict[str, Any] = {}
    for name in EMBEDDED:
        model = read_model(out / name)
        for number, ids in enumerate(read_prompts(out / name)):
            prompt = torch.tensor(ids.astype(np.int64))[None]
            hidden = model(prompt, output_hidden_states=True).hidden_states[-1][0]
            expected[f"{name}/last_{number}"] = hidden[-1].numpy()
            expected[f"{name}/mean_{number}"] = hidden.double().mean(axis=0).float().numpy()
    np.savez_compressed(out.parent / "embeddings.npz", **expected)


def main() -> int:
    """Make or verify all cases, or write their embeddings; 1 if one differs."""
    parser = make_parser(__doc__, "tests/fixtures/reference")
    parser.add_argument(
        "--embeddings", action="store_true", help="write embeddings.npz of the existing models only"
    )
    args = parser.parse_args()
    if args.embeddings:
        set_up_torch()
        embed(args.out)
        return 0
    return run(args, CASES, make, verify)


if __name__ == "__main__":
    sys.exit(main())
