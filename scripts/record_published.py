"""Record quantised matrices as the programs that publish them write and dequantise them.

Each file of tests/fixtures/published has the tensors of one matrix, its entries in float32 ("plain"), and in its
metadata the `quantization_config`. With Python 3.11:

    pip install torch==2.13.0 compressed-tensors==0.20.1 gptqmodel==7.7.0
    python -m scripts.record_published

With `--model FILE.gguf --output DIR` it writes a whole model in some forms.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "published"
OUTPUTS = 64
INPUTS = 128
GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of outputs in a word, as AutoAWQ packs them


Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Write all files, or a whole model in some forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file to write in all forms")
    parser.add_argument("--output", type=Path, help="the folder of its directories")
    args = parser.parse_args()
    if args.model is not None:
        write_model(args.model, args.output)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number, (name, settings) in enumerate(GPTQ.items()):
        record_gptq(name, settings, number)
    record_awq()
    for name, (form, fields) in COMPRESSED.items():
        record_compressed(name, form, fields)
    record_weights()


SEEDS = {"compressed": 11, "gptq-4": 0, "awq": 7}


def record_weights() -> None:
    """The matrices that some records were made from."""
    found = {}
    for name, seed in SEEDS.items():
        torch.manual_seed(seed)
        found[name] = torch.randn(OUTPUTS, INPUTS) / 8
    save_file(found, FOLDER.with_name("published_weights.safetensors"))


GPTQ: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "gptq-4-zeros": {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "gptq-4-all-inputs": {"bits": 4, "group_size": -1, "sym": True, "desc_act": False},
    "gptq-4-order": {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
    "gptq-8": {"bits": 8, "group_size": GROUP, "sym": False, "desc_act": False},
    "gptq-v2": {
        "bits": 4,
        "group_size": GROUP,
        "sym": False,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
    },
}


def record_gptq(name: str, settings: dict[str, Any], seed: int) -> None:
    """A matrix packed and dequantised by GPTQModel."""
    torch.manual_seed(seed)
    tensors, plain = gptq(torch.randn(OUTPUTS, INPUTS) / 8, settings)
    _save(name, {"quant_method": "gptq", **settings}, tensors, plain)


def gptq(weight: torch.Tensor, settings: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a matrix [O, I], rounded to the nearest numbers, and its entries."""
    outputs, inputs = weight.shape
    bits = settings["bits"]
    size = settings["group_size"] if settings["group_size"] > 0 else inputs
    order = torch.arange(inputs) // size
    if settings["desc_act"]:
        order = order[torch.randperm(inputs)]
    grouped = weight[:, torch.argsort(order, stable=True)].reshape(outputs, -1, size)
    scales, zeros = _range_of(grouped, bits, is_symmetric=settings["sym"])
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    layer.weight.data = weight
    module = TorchLinear(
        bits=bits,
        group_size=settings["group_size"],
        sym=settings["sym"],
        desc_act=settings["desc_act"],
        in_features=inputs,
        out_features=outputs,
    )
    module.pack_block(layer, scales, zeros, order.int(), workers=1)
    module.post_init()
    module.scales = module.scales.float()
    plain = module.dequantize_weight().T
    stored_zeros = module.qzeros.clone()
    if settings.get("checkpoint_format") != "gptq_v2":
        stored_zeros -= 0x11111111 if bits == 4 else 0x01010101
    tensors = {
        "qweight": module.qweight,
        "qzeros": stored_zeros,
        "scales": module.scales.half(),
        "g_idx": module.g_idx.int(),
    }
    return tensors, plain


def _range_of(
    grouped: torch.Tensor, bits: int, *, is_symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in float16 and zero points [O, G] of numbers [O, G, inputs]. Version 1 has no zero point of 0."""
    if is_symmetric:
        scales = grouped.abs().amax(dim=-1) / (2 ** (bits - 1) - 1)
        return scales.half().float(), torch.full_like(scales, 2 ** (bits - 1))
    least = grouped.amin(dim=-1).clamp(max=0)
    most = grouped.amax(dim=-1).clamp(min=0)
    scales = ((most - least) / (2**bits - 1)).half().float()
    return scales, torch.round(-least / scales).clamp(1, 2**bits - 1)


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}


def record_awq() -> None:
    """A matrix in AutoAWQ's order of outputs, dequantised by GPTQModel's copy of its code."""
    torch.manual_seed(SEEDS["awq"])
    _save("awq", AWQ, *awq(torch.randn(OUTPUTS, INPUTS) / 8, GROUP))


def awq(weight: torch.Tensor, size: int) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a matrix [O, I], rounded to the nearest numbers, and its entries."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, -1, size)
    scales, zeros = _range_of(grouped, 4, is_symmetric=False)
    numbers = torch.round(grouped / scales[..., None] + zeros[..., None]).clamp(0, 15)

    def packed(values: torch.Tensor) -> torch.Tensor:
        eights = values.reshape(values.shape[0], -1, 8)[..., list(_AWQ_ORDER)].long()
        words = (eights << (4 * torch.arange(8))).sum(dim=-1)
        return torch.where(words >= 2**31, words - 2**32, words).int()

    tensors = {
        "qweight": packed(numbers.reshape(outputs, inputs).T.long()),
        "qzeros": packed(zeros.T.long()),
        "scales": scales.T.half(),
    }
    plain = dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales.T, 4, size).T
    return tensors, plain


COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "packed-4": (
        "pack-quantized",
        {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP},
    ),
    "packed-4-zeros": (
        "pack-quantized",
        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": GROUP},
    ),
    "packed-8": ("pack-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
    "fp8-tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
    ),
    "fp8-channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    ),
    "fp8-block": (
        "float-quantized",
        {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block",
            "block_structure": [32, 64],
        },
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
}


def record_compressed(name: str, form: str, fields: dict[str, Any]) -> None:
    """A matrix compressed and decompressed by compressed-tensors."""
    torch.manual_seed(SEEDS["compressed"])
    _save(
        name,
        scheme_config(form, fields),
        *compressed(torch.randn(OUTPUTS, INPUTS) / 8, form, fields),
    )


def scheme_config(form: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    weights = QuantizationArgs(**fields).model_dump(mode="json")
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def compressed(
    weight: torch.Tensor, form: str, fields: dict[str, Any]
) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a matrix [O, I], and its entries."""
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    state: dict[str, torch.Tensor] = {"weight": weight, **_parameters(weight, args)}
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(state, scheme)
    exact = dict(tensors, weight_scale=tensors["weight_scale"].float())
    if form == "nvfp4-pack-quantized":  # its own `decompress` rounds to bfloat16
        numbers = unpack_fp4_from_uint8(exact["weight_packed"], *weight.shape, torch.float32)
        whole = exact["weight_global_scale"]
        plain = dequantize(numbers, exact["weight_scale"], args=args, global_scale=whole)
    else:
        plain = compressor.decompress(exact, scheme)["weight"]
    return tensors, plain


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scales and zero points, from the least and largest numbers of each group."""
    strategy = str(args.strategy)
    if strategy == "tensor":
        parts = weight.reshape(1, 1, -1)
    elif strategy == "block":
        height, width = args.block_structure
        blocks = weight.reshape(len(weight) // height, height, -1, width).transpose(1, 2)
        parts = blocks.reshape(*blocks.shape[:2], -1)
    else:
        parts = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    least = parts.amin(dim=-1)
    most = parts.amax(dim=-1)
    if strategy == "tensor_group":
        whole = (448 * 6 / weight.abs().max()).reshape(1)
        scale, _ = calculate_qparams(least, most, args, global_scale=whole)
        return {"weight_scale": scale, "weight_global_scale": whole}
    scale, zeros = calculate_qparams(least, most, args)
    if strategy == "tensor":
        scale = scale.reshape(1)
    found = {"weight_scale": scale.bfloat16()}
    if not args.symmetric:
        found["weight_zero_point"] = zeros.to(torch.int8)
    return found


def write_model(gguf_file: Path, folder: Path) -> None:
    """Write a model in some forms, and with plain weights. Matrices of blocks are rounded to the nearest numbers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name
    )
    plain = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        plain.pop("lm_head.weight", None)
    for name, (config, write) in _forms_of_models().items():
        tensors = dict(plain)
        for key, weight in plain.items():
            if write is not None and key.endswith("proj.weight"):
                stem = key.removesuffix("weight")
                del tensors[key]
                parts, _ = write(weight)
                tensors |= {stem + part: value.contiguous() for part, value in parts.items()}
        directory = folder / name
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "model.safetensors")
        tokenizer.save_pretrained(directory)
        settings = json.loads(model.config.to_json_string())
        for key in ("quantization_config", "_model_name_or_path"):
            settings.pop(key, None)
        if config is not None:
            settings["quantization_config"] = config
        text = json.dumps(settings, indent=1)
        (directory / "config.json").write_text(text, encoding="utf-8")


Write = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def _forms_of_models() -> dict[str, tuple[dict[str, Any] | None, Write | None]]:
    """The forms of `write_model`, with groups of 64 inputs."""
    found: dict[str, tuple[dict[str, Any] | None, Write | None]] = {"plain": (None, None)}
    settings = {"bits": 4, "group_size": 64, "sym": False, "desc_act": False}
    found["gptq"] = ({"quant_method": "gptq", **settings}, partial(gptq, settings=settings))
    found["awq"] = ({**AWQ, "group_size": 64}, partial(awq, size=64))
    for name, form, fields in (
        ("w4a16", "pack-quantized", {**COMPRESSED["packed-4"][1], "group_size": 64}),
        ("w8a16", *COMPRESSED["packed-8"]),
        ("int8", *COMPRESSED["int8"]),
        ("fp8", *COMPRESSED["fp8-channel"]),
        ("nvfp4", *COMPRESSED["nvfp4"]),
    ):
        write = partial(compressed, form=form, fields=fields)
        found[name] = (scheme_config(form, fields), write)
    return found


def _save(
    name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], plain: torch.Tensor
) -> None:
    stored = {f"layer.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(
        {**stored, "plain": plain.detach().float().contiguous()},
        FOLDER / f"{name}.safetensors",
        metadata={"quantization_config": json.dumps(config)},
    )


if __name__ == "__main__":
    main()
