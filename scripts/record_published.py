"""Record quantised matrices as the programs that publish them write and dequantise them.

Each file of tests/fixtures/published has the tensors of one matrix, its entries in float32 ("plain"), and in its
metadata the `quantization_config`. With Python 3.11:

    pip install torch==2.13.0 compressed-tensors==0.20.1 gptqmodel==7.7.0
    python -m scripts.record_published
"""

import json
from pathlib import Path
from typing import Any

import torch
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


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number, (name, settings) in enumerate(GPTQ.items()):
        record_gptq(name, settings, number)
    record_awq()
    for name, (form, fields) in COMPRESSED.items():
        record_compressed(name, form, fields)


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
    bits = settings["bits"]
    groups = INPUTS // settings["group_size"] if settings["group_size"] > 0 else 1
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    scales = (0.5 + torch.rand(OUTPUTS, groups)).half().float() / 2**bits
    zeros = torch.randint(1, 2**bits - 1, (OUTPUTS, groups)).float()
    if settings["sym"]:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    order = torch.arange(INPUTS) // (INPUTS // groups)
    if settings["desc_act"]:
        order = order[torch.randperm(INPUTS)]
    module = TorchLinear(
        bits=bits,
        group_size=settings["group_size"],
        sym=settings["sym"],
        desc_act=settings["desc_act"],
        in_features=INPUTS,
        out_features=OUTPUTS,
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
    _save(name, {"quant_method": "gptq", **settings}, tensors, plain)


def record_awq() -> None:
    """A matrix in AutoAWQ's order of outputs, dequantised by GPTQModel's copy of its code."""
    torch.manual_seed(7)
    numbers = torch.randint(0, 16, (INPUTS, OUTPUTS))
    zeros = torch.randint(0, 16, (INPUTS // GROUP, OUTPUTS))
    scales = (0.5 + torch.rand(INPUTS // GROUP, OUTPUTS)).half() / 16

    def packed(values: torch.Tensor) -> torch.Tensor:
        eights = values.reshape(values.shape[0], -1, 8)[..., list(_AWQ_ORDER)].long()
        words = (eights << (4 * torch.arange(8))).sum(dim=-1)
        return torch.where(words >= 2**31, words - 2**32, words).int()

    tensors = {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}
    plain = dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales.float(), 4, GROUP).T
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    _save("awq", config, tensors, plain)


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
        },
    ),
}


def record_compressed(name: str, form: str, fields: dict[str, Any]) -> None:
    """A matrix compressed and decompressed by compressed-tensors."""
    torch.manual_seed(11)
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    weight = torch.randn(OUTPUTS, INPUTS) / 8
    state: dict[str, torch.Tensor] = {"weight": weight, **_parameters(weight, args)}
    compressor = BaseCompressor.get_value_from_registry(form)
    compressed = compressor.compress(state, scheme)
    exact = dict(compressed, weight_scale=compressed["weight_scale"].float())
    if form == "nvfp4-pack-quantized":  # its own `decompress` rounds to bfloat16
        numbers = unpack_fp4_from_uint8(exact["weight_packed"], OUTPUTS, INPUTS, torch.float32)
        whole = exact["weight_global_scale"]
        plain = dequantize(numbers, exact["weight_scale"], args=args, global_scale=whole)
    else:
        plain = compressor.decompress(exact, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
        },
    }
    _save(name, config, compressed, plain)


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scales and zero points, from the least and largest numbers of each group."""
    strategy = str(args.strategy)
    if strategy == "tensor":
        parts = weight.reshape(1, 1, -1)
    elif strategy == "block":
        height, width = args.block_structure
        blocks = weight.reshape(OUTPUTS // height, height, INPUTS // width, width)
        parts = blocks.transpose(1, 2).reshape(OUTPUTS // height, INPUTS // width, -1)
    else:
        parts = weight.reshape(OUTPUTS, -1, args.group_size or INPUTS)
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
