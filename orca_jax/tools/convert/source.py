"""The source and the output of a conversion, checked before JAX is imported and before anything is written."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

from orca_jax.assembly.support import Facts, check_support, quantised
from orca_jax.helpers.bundled import is_gguf, is_preset, model_directory
from orca_jax.helpers.orbax_names import MAPPING
from orca_jax.model.describe import named_dtype, read_model_config
from orca_jax.model.gguf.config import hf_config_of
from orca_jax.model.weight_files import check_weights
from orca_jax.text.gguf_texts import templates_of_gguf, tokenizer_of_gguf
from orca_jax.tools.convert.args import OutputFormat
from orca_jax.values.checks import is_writable
from orca_jax.values.config import DType, EngineConfig, LoadFormat, ModelConfig
from orca_jax.values.errors import ConfigError

CONFIG = "config.json"
_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_OF_WEIGHTS = ".index.json"  # the end of the lists of shards, of each format and variant


@dataclass(frozen=True)
class Conversion:
    """A conversion that can begin.

    Attributes:
        source: a model directory or a GGUF file.
        output: the absolute path of the directory to write, without symbolic links.
        values: the contents of config.json.
        copied: other files to copy, none of them config.json.
        made: the contents of further files by name: the tokenizer and the chat templates of a GGUF file.
        model: the configuration, quantised as requested.
        dtype: type of the written weights.
        load_format: the format of the weights in `source`.
        output_format: the format to write.
    """

    source: Path
    output: Path
    values: Mapping[str, Any]
    copied: tuple[Path, ...]
    made: Mapping[str, str]
    model: ModelConfig
    dtype: DType
    load_format: LoadFormat
    output_format: OutputFormat

    @classmethod
    def of(cls, args: Namespace) -> Self:
        """Check the flags of `make_parser`. A model of the Hub is downloaded.

        Raises:
            ConfigError: the model or the output is wrong; `param` names the flag.
        """
        if is_preset(args.model):
            message = f"{args.model} has random weights and no files; give a model directory, ORG/NAME or a GGUF file"
            raise ConfigError(message, param="model")
        place = {
            "tokenizer": args.tokenizer,
            "revision": args.revision,
            "download_dir": args.download_dir,
        }
        place["load_format"] = args.load_format
        check_support(Facts(EngineConfig(args.model, **place)), "settings")
        output = Path(os.path.realpath(args.output))
        check_output(output, args.force)
        source = Path(model_directory(args.model, args.revision, args.download_dir))
        if output == source.resolve() or output in source.resolve().parents:
            message = f"{args.output} holds the model to read; choose another directory"
            raise ConfigError(message, param="output")
        model = quantised(EngineConfig(quantization=args.quantization), read_model_config(source))
        check_weights(source, args.load_format)
        _check_format(args, model)
        values = dict(hf_config_of(source)) if is_gguf(str(source)) else _read(source / CONFIG)
        texts = _texts_of(args, source)
        return cls(
            source,
            output,
            values,
            texts,
            _texts_in(source) if args.tokenizer is None else {},
            model,
            args.dtype or named_dtype(values) or "float32",
            args.load_format,
            args.output_format,
        )


def _check_format(args: Namespace, model: ModelConfig) -> None:
    """Refuse safetensors of weights that have no plain values, or no names in such files."""
    if args.output_format == "orbax":
        return
    if args.quantization is not None:
        message = f"stores weights of Orbax checkpoints; leave it out with --output-format {args.output_format}"
        raise ConfigError(f"--quantization {message}", param="quantization")
    if model.quantization is not None:
        message = (
            f"{args.model} is stored in {model.quantization}; give the model that it was made from"
        )
        raise ConfigError(message, param="output_format")
    if model.decoder is not None:
        message = "a decoder of your own has no names of tensors in safetensors; choose orbax"
        raise ConfigError(message, param="output_format")
    if model.shared_blocks is not None:
        message = (
            f"layers of {model.family} share weights in safetensors, and not here; choose orbax"
        )
        raise ConfigError(message, param="output_format")


def check_output(output: Path, may_replace: bool) -> None:
    """Refuse an output that exists, unless it is an empty directory, or a model directory to replace.

    Raises:
        ConfigError: it exists, or it cannot be made; `param` is "output".
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is not a directory; choose another path", param="output")
    place = next(folder for folder in (output.parent, *output.parents) if folder.exists())
    if not is_writable(place):
        message = f"{place} cannot be written: Permission denied; choose another place, or change its permissions"
        raise ConfigError(message, param="output")
    if not output.exists() or not any(output.iterdir()):
        return
    if not may_replace:
        message = f"{output} already exists; choose another directory, or replace it with --force"
        raise ConfigError(message, param="output")
    if not (output / CONFIG).is_file():
        message = f"{output} is not a model directory, and --force replaces nothing else; choose another directory"
        raise ConfigError(message, param="output")


def _texts_of(args: Namespace, source: Path) -> tuple[Path, ...]:
    """The files to copy beside the weights. Those of `--tokenizer` replace files of the same name."""
    folders = [] if source.is_file() else [source]
    if args.tokenizer is not None:
        folder = Path(model_directory(args.tokenizer, None, args.download_dir, needs_weights=False))
        if not folder.is_dir():
            message = f"{args.tokenizer} is not a directory; give a directory with tokenizer.json, or ORG/NAME"
            raise ConfigError(message, param="tokenizer")
        folders.append(folder)
    found: dict[str, Path] = {}
    for folder, pattern in product(folders, _TEXTS):
        found |= {file.name: file for file in sorted(folder.glob(pattern)) if _is_text(file)}
    return tuple(found.values())


def _texts_in(source: Path) -> dict[str, str]:
    """The texts in a GGUF file, as a directory has them. Raises ConfigError: its tokenizer is not read."""
    if not is_gguf(str(source)):
        return {}
    tokenizer, tokens = tokenizer_of_gguf(source)
    templates, _ = templates_of_gguf(source)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    if templates:
        settings["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    if len(templates) == 1:
        settings["chat_template"] = templates["default"]
    found = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    return {name: json.dumps(values, ensure_ascii=False) for name, values in found.items()}


def _is_text(file: Path) -> bool:
    if file.name.endswith(_OF_WEIGHTS) or file.name in (CONFIG, MAPPING):
        return False
    return file.is_file()


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values
