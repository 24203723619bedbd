"""The forms of published files that `orca-jax convert` writes: a matrix [outputs, inputs] as its parts.

Numbers are rounded to the nearest; nothing is fitted to data. The orders of words are those that
`model/published/words.py` reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from orca_jax.model.published.numbers import FP4_GROUP
from orca_jax.model.published.words import AWQ_ORDER, WORD_BITS
from orca_jax.tools.convert.args import PublishedFormat

type MatrixTensors = dict[str, np.ndarray]
type Settings = dict[str, Any]

BLOCK = 128  # outputs and inputs of a scale of `fp8-block`
GROUPS = (128, 64, 32, 16)
_OUTPUT_AT = np.argsort(AWQ_ORDER)  # the output at each place of a word
_MOST_E4M3 = 448.0
_MOST_E2M1 = 6.0


@dataclass(frozen=True)
class WrittenForm:
    """A form of files.

    Attributes:
        parts: the tensors of a matrix in float32, by the ends of their names; the number is that of inputs with one
            scale.
        settings: the `quantization_config`, for this number and the names of plain layers.
        has_groups: False for scales of whole rows or blocks.
        outputs: each matrix has a multiple of these.
        inputs: the same of inputs.
    """

    parts: Callable[[np.ndarray, int], MatrixTensors]
    settings: Callable[[int, Sequence[str]], Settings]
    has_groups: bool = False
    outputs: int = 1
    inputs: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a matrix of this shape can be written."""
        return shape[0] % self.outputs == 0 and shape[1] % self.inputs == 0


def awq(weight: np.ndarray, group: int) -> MatrixTensors:
    """AWQ (`version: gemm`): words of eight outputs, with zero points."""
    numbers, scales, zeros = _with_zeros(weight, group)
    return {
        "qweight": _words(_in_awq_order(numbers.T), 4),
        "qzeros": _words(_in_awq_order(zeros.T), 4),
        "scales": np.ascontiguousarray(scales.T),
    }


def gptq(weight: np.ndarray, group: int) -> MatrixTensors:
    """GPTQ of version 1, symmetric: words of eight inputs. A zero point is stored less 1."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, -1, group)
    scales = _nonzero((np.abs(grouped).max(axis=-1) / 7).astype(np.float16))
    numbers = _rounded(grouped, scales, -8, 7) + 8
    return {
        "qweight": np.ascontiguousarray(_words(numbers.reshape(outputs, inputs), 4).T),
        "qzeros": _words(np.full((inputs // group, outputs), 7), 4),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(inputs) // group).astype(np.int32),
    }


def packed(weight: np.ndarray, group: int, *, bits: int) -> MatrixTensors:
    """compressed-tensors, `pack-quantized`: words of some inputs."""
    numbers, scales = _symmetric(weight, group, bits)
    return {
        "weight_packed": _words(numbers + (1 << (bits - 1)), bits),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }


def int8(weight: np.ndarray, group: int) -> MatrixTensors:
    """compressed-tensors, `int-quantized`: a scale for each output."""
    numbers, scales = _symmetric(weight, group, 8)
    return {"weight": numbers.astype(np.int8), "weight_scale": scales}


def fp8(weight: np.ndarray, group: int) -> MatrixTensors:
    """compressed-tensors, `float-quantized`: a scale for each output."""
    scales = _nonzero(np.abs(weight).max(axis=1, keepdims=True) / _MOST_E4M3)
    stored = scales.astype(jnp.bfloat16)
    return {"weight": _e4m3(weight / stored.astype(np.float32)), "weight_scale": stored}


def fp8_blocks(weight: np.ndarray, group: int) -> MatrixTensors:
    """FP8 as DeepSeek publishes it: a scale for each block of 128 x 128, the last ones smaller."""
    outputs, inputs = weight.shape
    most = np.maximum.reduceat(np.abs(weight), np.arange(0, outputs, BLOCK), axis=0)
    most = np.maximum.reduceat(most, np.arange(0, inputs, BLOCK), axis=1)
    scales = _nonzero(most / _MOST_E4M3)
    whole = scales.repeat(BLOCK, axis=0)[:outputs].repeat(BLOCK, axis=1)[:, :inputs]
    return {"weight": _e4m3(weight / whole), "weight_scale_inv": scales}


def nvfp4(weight: np.ndarray, group: int) -> MatrixTensors:
    """compressed-tensors, `nvfp4-pack-quantized`: a scale for 16 inputs, and one that divides for the matrix."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, -1, FP4_GROUP)
    most = np.abs(grouped).max(axis=-1)
    divisor = np.float32(_MOST_E4M3 * _MOST_E2M1) * (1 / _nonzero(most.max()))
    scales = _nonzero(_e4m3(most / np.float32(_MOST_E2M1) * divisor))
    factors = scales.astype(np.float32)[..., None] / divisor
    scaled = np.clip(grouped / factors, -_MOST_E2M1, _MOST_E2M1)
    codes = scaled.astype(jnp.float4_e2m1fn).view(np.uint8).reshape(outputs, inputs)
    return {
        "weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_global_scale": np.array([divisor]),
    }


def _with_zeros(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of 4 bits [O, I], scales in float16 and zero points [O, G]. Zero is a number of each group."""
    grouped = weight.reshape(len(weight), -1, group)
    least = np.minimum(grouped.min(axis=-1), 0)
    most = np.maximum(grouped.max(axis=-1), 0)
    scales = _nonzero(((most - least) / 15).astype(np.float16))
    zeros = np.clip(np.round(-least / scales.astype(np.float32)), 1, 15)
    numbers = _rounded(grouped, scales, 0, 15, zeros)
    return numbers.reshape(weight.shape), scales, zeros


def _symmetric(weight: np.ndarray, group: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Signed numbers [O, I], and scales in bfloat16 [O, G], as compressed-tensors computes them."""
    grouped = weight.reshape(len(weight), -1, group)
    half = 1 << (bits - 1)
    scales = _nonzero(np.abs(grouped).max(axis=-1) / np.float32(half - 0.5))
    stored = scales.astype(jnp.bfloat16)
    return _rounded(grouped, stored, -half, half - 1).reshape(weight.shape), stored


def _rounded(
    grouped: np.ndarray,
    scales: np.ndarray,
    least: int,
    most: int,
    zeros: np.ndarray | float = 0,
) -> np.ndarray:
    """The nearest numbers of groups [O, G, inputs], with scales and zero points of each group."""
    scaled = grouped / scales.astype(np.float32)[..., None]
    return np.clip(np.round(scaled + np.expand_dims(zeros, -1)), least, most).astype(np.int32)


def _nonzero(scales: np.ndarray) -> np.ndarray:
    """Scales with a small one in place of each zero, whose numbers are zeros in any case."""
    return np.where(scales == 0, jnp.finfo(scales.dtype).eps, scales)


def _e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -_MOST_E4M3, _MOST_E4M3).astype(jnp.float8_e4m3fn)


def _in_awq_order(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), -1, 8)[..., _OUTPUT_AT].reshape(rows.shape)


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [rows, columns] as int32 [rows, words], the lowest bits first. The last word of a row is filled up."""
    each = WORD_BITS // bits
    rows, columns = numbers.shape
    filled = np.zeros((rows, -(-columns // each) * each), np.uint32)
    filled[:, :columns] = numbers
    places = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    words: np.ndarray = np.bitwise_or.reduce(filled.reshape(rows, -1, each) << places, axis=-1)
    return words.view(np.int32)


def _awq_settings(group: int, plain: Sequence[str]) -> Settings:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(plain),
    }


def _gptq_settings(group: int, plain: Sequence[str]) -> Settings:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "modules_to_not_convert": list(plain),
    }


def _block_settings(group: int, plain: Sequence[str]) -> Settings:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(plain),
    }


def _compressed(
    format: str,
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
) -> Callable[[int, Sequence[str]], Settings]:
    """The settings of compressed-tensors. Activations are those that other engines quantise."""

    def settings(group: int, plain: Sequence[str]) -> Settings:
        own = {"symmetric": True, "dynamic": False, "group_size": None, **weights}
        if own["strategy"] == "group":
            own["group_size"] = group
        scheme = {"targets": ["Linear"], "weights": own, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "ignore": list(plain),
            "config_groups": {"group_0": scheme},
        }

    return settings


def _of_tokens(kind: str) -> Settings:
    """Activations with a scale for each token."""
    return {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }


FORMS: Mapping[PublishedFormat, WrittenForm] = {
    "awq": WrittenForm(awq, _awq_settings, has_groups=True, outputs=8),
    "gptq": WrittenForm(gptq, _gptq_settings, has_groups=True, outputs=8, inputs=8),
    "w4a16": WrittenForm(
        partial(packed, bits=4),
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
        has_groups=True,
    ),
    "w8a16": WrittenForm(
        partial(packed, bits=8),
        _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ),
    "w8a8": WrittenForm(
        int8,
        _compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            _of_tokens("int"),
        ),
    ),
    "fp8": WrittenForm(
        fp8,
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            _of_tokens("float"),
        ),
    ),
    "fp8-block": WrittenForm(fp8_blocks, _block_settings),
    "nvfp4": WrittenForm(
        nvfp4,
        _compressed(
            "nvfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": FP4_GROUP,
                "scale_dtype": "torch.float8_e4m3fn",
            },
        ),
        inputs=FP4_GROUP,
    ),
}
"""By the values of `--output-format`."""
