"""Model directories with random weights in published forms, beside the same models with plain weights."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

type Tensors = dict[str, np.ndarray]
type Writer = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]

VOCAB = 97
WIDTH = 64
INNER = 96
GROUP = 32
EXPERTS = 3
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

LLAMA = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
PHI3 = {
    "self_attn.qkv_proj": (2 * WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_up_proj": (2 * INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
MIXTRAL = {
    **{name: shape for name, shape in LLAMA.items() if name.startswith("self_attn")},
    **{f"block_sparse_moe.experts.{i}.w1": (INNER, WIDTH) for i in range(EXPERTS)},
    **{f"block_sparse_moe.experts.{i}.w2": (WIDTH, INNER) for i in range(EXPERTS)},
    **{f"block_sparse_moe.experts.{i}.w3": (INNER, WIDTH) for i in range(EXPERTS)},
}
MODELS = {"llama": LLAMA, "phi3": PHI3, "mixtral": MIXTRAL}
"""The shapes [O, I] of the quantised layers of a block, by `model_type`."""


def settings(model: str) -> dict[str, Any]:
    """The config.json of a plain model."""
    found = {
        "model_type": model,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    if model == "mixtral":
        found |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    return found


def write(
    folder: Path,
    model: str,
    form: str,
    plain_layers: tuple[str, ...] = (),
    changes: Mapping[str, np.ndarray | None] | None = None,
) -> tuple[Path, Path]:
    """Write a model in a published form, and the same with plain weights.

    Args:
        folder: takes two directories.
        model: its `model_type`.
        form: a key of `FORMS`.
        plain_layers: layers, such as "0.self_attn.q_proj", that are plain in both.
        changes: other values of tensors in the published form, by their keys; None leaves one out.

    Returns:
        both directories.
    """
    random = np.random.default_rng(5)
    config, writer = FORMS[form]
    plain = _others(random, model)
    published = dict(plain)
    for layer in range(2):
        for name, (outputs, inputs) in MODELS[model].items():
            key = f"model.layers.{layer}.{name}"
            parts, values = writer(random, outputs, inputs)
            plain[f"{key}.weight"] = values
            if f"{layer}.{name}" in plain_layers:
                parts = {"weight": values}
            published |= {f"{key}.{part}": array for part, array in parts.items()}
    for key, changed in (changes or {}).items():
        del published[key]
        if changed is not None:
            published[key] = changed
    found = []
    for name, tensors, more in (
        ("published", published, {"quantization_config": config}),
        ("plain", plain, {}),
    ):
        directory = folder / name
        directory.mkdir()
        text = json.dumps({**settings(model), **more})
        (directory / "config.json").write_text(text, encoding="utf-8")
        save_file(tensors, directory / "model.safetensors")
        found.append(directory)
    return found[0], found[1]


def _others(random: np.random.Generator, model: str) -> Tensors:
    """The tensors that no form quantises."""

    def table() -> np.ndarray:
        return random.normal(0, 0.5, (VOCAB, WIDTH)).astype(np.float32)

    found = {
        "model.embed_tokens.weight": table(),
        "lm_head.weight": table(),
        "model.norm.weight": np.ones(WIDTH, np.float32),
    }
    for layer in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            key = f"model.layers.{layer}.{name}.weight"
            found[key] = random.uniform(0.5, 1.5, WIDTH).astype(np.float32)
        if model == "mixtral":
            key = f"model.layers.{layer}.block_sparse_moe.gate.weight"
            found[key] = random.normal(0, 0.5, (EXPERTS, WIDTH)).astype(np.float32)
    return found


def words_of(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [rows, columns] as words of 32 bits [rows, words], the lowest bits first; the last one is filled up."""
    each = 32 // bits
    filled = np.zeros((len(numbers), -(-numbers.shape[1] // each) * each), np.uint32)
    filled[:, : numbers.shape[1]] = numbers
    shifted = filled.reshape(len(numbers), -1, each) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)


def integers(
    random: np.random.Generator, outputs: int, groups: int, inputs: int, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random numbers [O, I], scales and zero points [O, G]."""
    numbers = random.integers(0, 2**bits, (outputs, inputs))
    zeros = random.integers(1, 2**bits - 1, (outputs, groups))
    scales = random.uniform(0.5, 1.5, (outputs, groups)) / 2**bits / np.sqrt(inputs) * 4
    return numbers, scales.astype(np.float16), zeros


def entries(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """The entries of a matrix of integers whose inputs have these groups."""
    return (scales.astype(np.float32)[:, groups] * (numbers - zeros[:, groups])).astype(np.float32)


def gptq(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """GPTQ, version 1, with zero points and groups in a random order."""
    count = inputs // GROUP
    numbers, scales, zeros = integers(random, outputs, count, inputs, 4)
    groups = random.permutation(np.arange(inputs) // GROUP).astype(np.int32)
    parts = {
        "qweight": words_of(numbers, 4).T.copy(),
        "qzeros": words_of(zeros.T - 1, 4),
        "scales": scales.T.copy(),
        "g_idx": groups,
        "bias": np.zeros(outputs, np.float16),  # written for layers without a bias, too
    }
    return parts, entries(numbers, scales, zeros, groups)


def awq(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """AWQ in the order of `gemm`."""
    numbers, scales, zeros = integers(random, outputs, inputs // GROUP, inputs, 4)

    def packed(rows: np.ndarray) -> np.ndarray:
        eights = rows.reshape(len(rows), -1, 8)[..., _AWQ]
        return words_of(eights.reshape(len(rows), -1), 4)

    parts = {"qweight": packed(numbers.T), "qzeros": packed(zeros.T), "scales": scales.T.copy()}
    return parts, entries(numbers, scales, zeros, np.arange(inputs) // GROUP)


def packed_4(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors, W4A16 without symmetry."""
    numbers, scales, zeros = integers(random, outputs, inputs // GROUP, inputs, 4)
    parts = {
        "weight_packed": words_of(numbers, 4),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_zero_point": words_of(zeros.T, 4).T.copy(),
        "weight_shape": np.array([outputs, inputs], np.int64),
    }
    rounded = parts["weight_scale"].astype(np.float32)
    return parts, entries(numbers, rounded, zeros, np.arange(inputs) // GROUP)


def int8(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors, W8A8: a scale for each output."""
    numbers = random.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales = (random.uniform(0.5, 1.5, (outputs, 1)) / 128 / np.sqrt(inputs)).astype(np.float32)
    parts = {"weight": numbers, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    return parts, numbers.astype(np.float32) * scales


def _floats(random: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    return random.normal(0, 64, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)


def fp8_rows(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """FP8 with a scale for each output, as FBGEMM has it."""
    numbers = _floats(random, outputs, inputs)
    scales = (random.uniform(0.5, 1.5, (outputs, 1)) / 64 / np.sqrt(inputs)).astype(np.float32)
    return {"weight": numbers, "weight_scale": scales}, numbers.astype(np.float32) * scales


def fp8_blocks(
    random: np.random.Generator, outputs: int, inputs: int, width: int = 40
) -> tuple[Tensors, np.ndarray]:
    """FP8 with a scale for blocks of 48 outputs and some inputs, the last ones smaller."""
    numbers = _floats(random, outputs, inputs)
    shape = -(-outputs // 48), -(-inputs // width)
    scales = (random.uniform(0.5, 1.5, shape) / 64 / np.sqrt(inputs)).astype(np.float32)
    whole = np.repeat(np.repeat(scales, 48, axis=0), width, axis=1)[:outputs, :inputs]
    parts = {"weight": numbers, "weight_scale_inv": scales}
    return parts, numbers.astype(np.float32) * whole


def fp8_whole(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """FP8 with a scale for the matrix, as ModelOpt writes it."""
    numbers = _floats(random, outputs, inputs)
    scale = np.float32(1 / 64 / np.sqrt(inputs))
    parts = {
        "weight": numbers,
        "weight_scale": np.array(scale),
        "input_scale": np.array(np.float32(1)),
    }
    return parts, numbers.astype(np.float32) * scale


def nvfp4(random: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    """NVFP4 as ModelOpt writes it: the scale of the matrix is a factor."""
    codes = random.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = random.uniform(0.5, 1.5, (outputs, inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(1 / 4 / np.sqrt(inputs))
    numbers = _E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    parts = {
        "weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": np.array(whole),
    }
    return parts, numbers * np.repeat(scales.astype(np.float32) * whole, 16, axis=1)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


FORMS: Mapping[str, tuple[dict[str, Any], Writer]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
        gptq,
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        awq,
    ),
    "packed": (
        compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            symmetric=False,
            strategy="group",
            group_size=GROUP,
        ),
        packed_4,
    ),
    "int8": (
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        int8,
    ),
    "fp8-blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [48, 40],
        },
        fp8_blocks,
    ),
    "fp8-rows": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        fp8_rows,
    ),
    "fp8-groups": (
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
        partial(fp8_blocks, width=32),
    ),
    "fp8-parts": (
        {"quant_method": "fp8", "weight_block_size": [48, 64]},
        partial(fp8_blocks, width=64),
    ),
    "fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_whole),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
}
"""By a name of ours: the `quantization_config`, and the writer of a matrix."""
