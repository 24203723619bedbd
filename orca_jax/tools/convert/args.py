"""The flags of `orca-jax convert`."""

import argparse
from typing import Literal, get_args

from orca_jax.flags import FlagParser, flag_of, help_of, program
from orca_jax.values.config import DType, LoadFormat, Quantization

DESCRIPTION = """\
Write a model as a directory with an Orbax checkpoint, which loads by shards, or with safetensors, plain or in a form
that other engines read, too. config.json, tokenizer and chat template are copied, or made of a GGUF file. The
weights pass through the memory of one device.

    orca-jax convert --model ORG/NAME --output models/name
    orca-jax convert --model models/smol --output models/smol-int8 --quantization int8
    orca-jax convert --model models/smol --output models/smol-awq --output-format awq
"""

PublishedFormat = Literal["awq", "gptq", "w4a16", "w8a16", "w8a8", "fp8", "fp8-block", "nvfp4"]
"""The forms of quantised matrices that other engines read; `forms.py` writes them."""
OutputFormat = Literal["orbax", "safetensors", PublishedFormat]


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    parser = FlagParser(
        program("convert"),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help='model to read: a directory, ORG/NAME, a GGUF file, or "demo"',
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="model directory to write")
    parser.add_argument(
        "--force", action="store_true", help="replace --output if it is a model directory"
    )
    types = get_args(DType)
    formats = [name for name in get_args(LoadFormat) if name != "dummy"]
    parser.add_argument(
        "--dtype", choices=types, help="type of the written weights (default: as in config.json)"
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="store the weights of an Orbax checkpoint in 8 or 4 bits (default: as they are)",
    )
    parser.add_argument(
        "--output-format",
        choices=get_args(OutputFormat),
        default="orbax",
        help="format to write: an Orbax checkpoint, plain safetensors, or safetensors with the matrices of layers "
        "rounded to AWQ or GPTQ (4 bits), to W4A16, W8A16, W8A8, FP8 or NVFP4 of compressed-tensors, or to FP8 with "
        "DeepSeek's blocks (default: orbax)",
    )
    parser.add_argument(
        "--load-format",
        choices=formats,
        default="auto",
        help="format of the weights to read (default: auto)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory or ORG/NAME of the tokenizer to copy; default: that of the model",
    )
    for name in ("revision", "download_dir"):
        parser.add_argument(
            flag_of(name), metavar="DIR" if name == "download_dir" else "NAME", help=help_of(name)
        )
    parser.add_config_flag()
    return parser
