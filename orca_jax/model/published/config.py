"""The `quantization_config` of other programs: which forms are read, and which are refused by name.

Only what changes a number is read. Which layers have quantised matrices follows from the tensors in the files, so lists
of layers (`ignore`, `modules_to_not_convert`, `targets`) are not read. Activations keep their type.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orca_jax.model.families.base import words
from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import StoredForm

_BLOCK = (128, 128)
type Values = Mapping[str, Any]

PARAM = "quantization_config"
_NF4 = (
    "its tensors are not read. Convert the model where transformers and bitsandbytes are installed: python -c "
    "\"from transformers import AutoModelForCausalLM as M; M.from_pretrained('MODEL').dequantize()"
    ".save_pretrained('PLAIN')\", and give --quantization int4"
)
_PLAIN = "use the model's weights without quantization, and give --quantization int8 or int4"


@dataclass(frozen=True)
class Method:
    """One `quant_method`.

    Args:
        read: the form, from values with checked keys.
        fixed: the keys with an effect on the numbers that `read` does not look at, each with its supported values.
        read_keys: the keys that `read` looks at.
        harmless: keys without effect on the numbers.
    """

    read: Callable[[Values], StoredForm]
    fixed: Mapping[str, tuple[object, ...]]
    read_keys: frozenset[str]
    harmless: frozenset[str]


def read_stored_form(values: Values) -> StoredForm:
    """The form of the weights.

    Args:
        values: the `quantization_config` of a config.json.

    Raises:
        ConfigError: the form is not read; `param` is "quantization_config".
    """
    name = values.get("quant_method")
    if name == "bitsandbytes":
        raise _refusal(f"quant_method bitsandbytes: {_NF4}")
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        known = ", ".join(sorted(METHODS))
        raise _refusal(f"quant_method {short(name)} is not read, only {known}: {_PLAIN}")
    for key, supported in method.fixed.items():
        if key in values and values[key] not in supported:
            raise _wrong(key, values[key], f"must be {short(supported[0])}")
    known_keys = method.read_keys | method.fixed.keys() | method.harmless | {"quant_method"}
    unknown = sorted(key for key in values if key not in known_keys and values[key] is not None)
    if unknown:
        message = f"key {short(unknown[0])} is unknown for {name}, and may change the weights"
        raise _refusal(f"{message}; remove it if the model does not need it")
    return method.read(values)


def _gptq(values: Values) -> StoredForm:
    version = values.get("checkpoint_format", values.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise _wrong("checkpoint_format", version, "must be gptq or gptq_v2")
    return StoredForm(
        layout="gptq",
        bits=_bits(values, "bits"),
        group_size=_group_size(values, "group_size"),
        zero_offset=int(version == "gptq"),
        is_ordered=_flag(values, "desc_act", default=False),
    )


def _awq(values: Values) -> StoredForm:
    bits_key = "bits" if "bits" in values else "w_bit"
    size_key = "group_size" if "group_size" in values else "q_group_size"
    if values.get(bits_key) != 4:
        raise _wrong(bits_key, values.get(bits_key), "must be 4")
    version = str(values.get("version", "gemm")).lower()
    if version != "gemm":
        raise _wrong("version", version, "must be gemm: other orders of numbers are not read")
    return StoredForm(
        layout="awq",
        bits=4,
        group_size=_group_size(values, size_key),
    )


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (*_COMPRESSED, "nvfp4-pack-quantized", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
_OF_WEIGHTS = words(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder observer "
    "observer_kwargs scale_dtype zp_dtype"
)


def _compressed(values: Values) -> StoredForm:
    formats = [values.get("format", "pack-quantized")]
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise _wrong("config_groups", groups, "must be an object of objects")
    for group in groups.values():
        formats.append(group.get("format") or formats[0])
        _check_scheme(group.get("weights"))
    blocks = {_block(group["weights"].get("block_structure")) for group in groups.values()}
    if len(blocks) > 1:
        raise _wrong("config_groups", sorted(blocks), "must have one block_structure")
    for name in formats:
        if name not in _FORMATS:
            raise _wrong("format", name, f"must be one of {', '.join(_FORMATS)}")
    schemes = [group["weights"] for group in groups.values()]
    return StoredForm(
        layout="scaled",
        bits=max([scheme.get("num_bits", 8) for scheme in schemes], default=8),
        group_size=min([scheme.get("group_size") or 0 for scheme in schemes], default=0),
        has_integers=any([scheme.get("type", "int") == "int" for scheme in schemes]),
        block=blocks.pop() if blocks else _BLOCK,
    )


def _check_scheme(scheme: object) -> None:
    """Refuse a scheme of weights with a number that is not read."""
    if not isinstance(scheme, dict):
        raise _wrong("weights", scheme, "must be an object in each of config_groups")
    supported: Mapping[str, tuple[object, ...]] = {
        "num_bits": (4, 8),
        "type": ("int", "float"),
        "dynamic": (False, None),
        "strategy": _STRATEGIES,
        "actorder": (None, False, "group", "weight", "static", "dynamic"),
    }
    for key, known in supported.items():
        if scheme.get(key, known[0]) not in known:
            raise _wrong(f"weights.{key}", scheme[key], f"must be one of {short(known)}")
    unknown = sorted(scheme.keys() - _OF_WEIGHTS)
    if unknown:
        raise _wrong(f"weights.{unknown[0]}", scheme[unknown[0]], "is unknown")


def _scaled(values: Values) -> StoredForm:
    block = _block(values.get("weight_block_size"))
    size = block[1] if values.get("weight_block_size") else 0
    return StoredForm(layout="scaled", bits=8, group_size=size, has_integers=False, block=block)


def _modelopt(values: Values) -> StoredForm:
    algorithm = values.get("quant_algo")
    if algorithm not in ("FP8", "NVFP4"):
        raise _wrong("quant_algo", algorithm, "must be FP8 or NVFP4")
    return StoredForm(layout="scaled", bits=8 if algorithm == "FP8" else 4, has_integers=False)


def _block(size: object) -> tuple[int, int]:
    """Outputs and inputs of the block of a scale."""
    if size is None:
        return _BLOCK
    if (
        isinstance(size, list)
        and len(size) == 2
        and all(type(each) is int and 0 < each < 2**20 for each in size)
    ):
        return size[0], size[1]
    raise _wrong("weight_block_size", size, "must be two positive numbers")


def _bits(values: Values, key: str) -> int:
    bits = values.get(key)
    if bits == 4 or bits == 8:
        return int(bits)
    raise _wrong(key, bits, "must be 4 or 8")


def _group_size(values: Values, key: str) -> int:
    """Inputs that share a scale; -1, all of them, is 0 here."""
    size = values.get(key)
    if type(size) is int and (size == -1 or 0 < size < 2**20):
        return max(size, 0)
    raise _wrong(key, size, "must be a positive number of inputs, or -1 for all")


def _flag(values: Values, key: str, *, default: bool) -> bool:
    value = values.get(key, default)
    if isinstance(value, bool):
        return value
    raise _wrong(key, value, "must be true or false")


def _wrong(key: str, value: object, problem: str) -> ConfigError:
    return _refusal(f"{key} {short(value)} {problem}")


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config: {problem}", param=PARAM)


_NONE: tuple[object, ...] = (None, {}, [])

METHODS: Mapping[str, Method] = {
    "gptq": Method(
        _gptq,
        {"dynamic": _NONE, "pack_dtype": ("int32", None)},
        words("bits group_size desc_act checkpoint_format format"),
        words(
            "sym lm_head damp_percent damp_auto_increment true_sequential static_groups mse model_name_or_path "
            "model_file_base_name meta quantizer batch_size dataset block_name_to_quantize "
            "cache_block_outputs module_name_preceding_first_block modules_in_block_to_quantize "
            "pad_token_id tokenizer use_cuda_fp16 use_exllama disable_exllama exllama_config "
            "max_input_length backend method hyb_act act_group_aware modules_to_not_convert "
            "is_marlin_format offload_to_disk quant_algo"
        ),
    ),
    "awq": Method(
        _awq,
        {"zero_point": (True, None)},
        words("bits w_bit group_size q_group_size version"),
        words(
            "backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse modules_to_not_convert"
        ),
    ),
    "compressed-tensors": Method(
        _compressed,
        {
            "quantization_status": ("compressed", None),
            "sparsity_config": (None, {}, {"format": "dense"}),
            "transform_config": _NONE,
        },
        words("format config_groups"),
        words("ignore global_compression_ratio kv_cache_scheme version run_compressed"),
    ),
    "fp8": Method(
        _scaled,
        {"fmt": ("e4m3", "float8_e4m3fn", None)},
        words("weight_block_size"),
        words(
            "activation_scheme modules_to_not_convert ignored_layers scale_fmt "
            "weight_per_tensor act_per_tensor kv_cache_scheme is_checkpoint_fp8_serialized dequantize"
        ),
    ),
    "fbgemm_fp8": Method(
        _scaled, {}, words(""), words("activation_scale_ub modules_to_not_convert")
    ),
    "modelopt": Method(
        _modelopt,
        {},
        words("quant_algo"),
        words(
            "producer ignore exclude_modules kv_cache_scheme kv_cache_quant_algo config_groups group_size"
        ),
    ),
}
"""By their names in config.json."""
