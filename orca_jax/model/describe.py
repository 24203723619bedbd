"""The configuration of a model, from a directory's config.json or a preset, without weights and without JAX."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from orca_jax.helpers.bundled import PRESET_PREFIX, is_gguf, is_preset
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.family import Family
from orca_jax.model.families.keys import check_keys, resolve_aliases
from orca_jax.model.families.values import refusal, token_ids
from orca_jax.model.gguf.config import hf_config_of
from orca_jax.model.orbax_files import is_checkpoint
from orca_jax.model.published.config import read_stored_form
from orca_jax.values.checks import json_value, short
from orca_jax.values.config import DType, ModelConfig, Quantization
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import INT4_GROUP, StoredForm

QUANTIZATION_CONFIG = "quantization_config"
QUANT_METHOD = "orca-jax"  # within it
MAX_CONFIG_BYTES = 16 * 2**20

logger = logging.getLogger(__name__)


def preset_values(model: str) -> dict[str, Any]:
    """The config.json of "preset:<name>". Raises ConfigError if there is no such preset."""
    name = model.removeprefix(PRESET_PREFIX)
    presets = _presets()
    if name not in presets:
        raise ConfigError(
            f"unknown preset {name!r}; the presets are {', '.join(presets)}", param="model"
        )
    return presets[name]


def read_model_config(source: str | Path, decoder: str | None = None) -> ModelConfig:
    """The configuration of `source`, a model directory, a GGUF file or "preset:<name>".

    `decoder` is that of `EngineConfig`.

    End tokens of generation_config.json join those named in config.json, since models rely on both. If neither file
    names one, there is none, as in transformers.

    Raises:
        ConfigError: there is no such directory or preset, a file is not a JSON object, the `model_type` is unknown,
            or the decoder does not support an option. The error names the parameter.
    """
    if is_preset(str(source)):
        return _config_of(preset_values(str(source)), decoder)
    directory = Path(source)
    if is_gguf(str(source)):
        assert decoder is None, "refused by assembly/support.py"
        try:
            return config_from_hf(hf_config_of(source))
        except ConfigError as error:  # keys are named as in a config.json
            raise ConfigError(
                error.message.replace("config.json:", f"{source}:", 1), param=error.param
            ) from None
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; give a model directory, a name of the Hub such as ORG/NAME, "
            "gs://BUCKET/PATH, a GGUF file, or preset:<name>",
            param="model",
        )
    if not (directory / "config.json").exists() and is_checkpoint(directory):
        raise ConfigError(
            f"{directory / 'config.json'} is missing: {directory} has an Orbax checkpoint only. Put "
            f"config.json and tokenizer.json into a directory MODEL, then: ln -s {directory.absolute()} MODEL/params",
            param="model",
        )
    hf = read_object(directory / "config.json")
    config = _config_of(hf, decoder)
    generation = directory / "generation_config.json"
    extra: tuple[int, ...] = ()
    if generation.exists():
        extra = token_ids(read_object(generation).get("eos_token_id"), file=generation.name)
        _check_end_tokens(generation.name, extra, config)
    if "eos_token_id" not in hf and not extra:
        logger.warning(
            "%s: no eos_token_id in config.json: texts end only at stop strings and max_tokens",
            directory,
        )
    return dataclasses.replace(
        config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra)))
    )


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """The configuration described by a Hugging Face config.json.

    Raises:
        ConfigError: as in `read_model_config`.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        served = ", ".join(sorted(FAMILIES))
        near, missing = refused().get(str(kind), ("", ""))
        reason = f" ({missing} is missing; the nearest family is {near})" if near else ""
        raise ConfigError(
            f"config.json: model_type {short(kind)} is not supported{reason}, only {served}",
            param="model",
        )
    family = FAMILIES[kind]
    hf, quantization = take_quantization(hf)
    hf, stored = _take_stored_form(hf, family)
    check_keys(hf, family)
    config = dataclasses.replace(
        family.config_from_hf(resolve_aliases(hf, family)), quantization=quantization
    )
    if stored is not None:
        config = dataclasses.replace(config, stored=stored)
    _check_end_tokens("config.json", config.eos_token_ids, config)
    return config


def named_dtype(values: Mapping[str, Any]) -> DType | None:
    """Return the type that a config.json names; None if it names none that can be served."""
    text = values.get("text_config")
    name = (
        values.get("dtype")
        or values.get("torch_dtype")
        or (isinstance(text, dict) and named_dtype(text))
    )
    return next((kind for kind in get_args(DType) if kind == name), None)


def _config_of(hf: dict[str, Any], decoder: str | None) -> ModelConfig:
    """The configuration described by a config.json, which a class from outside this package may read in its own way."""
    if decoder is None:
        return config_from_hf(hf)
    from orca_jax.model.own import own_class  # imports JAX

    try:
        config = own_class(decoder).config_from_json(hf) or config_from_hf(hf)
    except KeyError as error:
        raise ConfigError(
            f"config.json: {error.args[0]} is missing, which {decoder} reads", param="model"
        ) from None
    _check_end_tokens("config.json", config.eos_token_ids, config)
    return dataclasses.replace(config, decoder=decoder)


def take_quantization(hf: dict[str, Any]) -> tuple[dict[str, Any], Quantization | None]:
    """The configuration without `quantization_config`, and the kind, if `orca-jax convert` wrote it.

    That of other programs is left.

    Raises:
        ConfigError: the kind is unknown.
    """
    found = hf.get(QUANTIZATION_CONFIG)
    if not isinstance(found, dict) or found.get("quant_method") != QUANT_METHOD:
        return hf, None
    kinds: tuple[Quantization, ...] = get_args(Quantization)
    kind = next((kind for kind in kinds if found == quantization_config(kind)), None)
    if kind is None:
        message = (
            f"config.json: quantization_config {short(found)} must have weights, one of {', '.join(kinds)}, for int4 "
            f"a group_size of {INT4_GROUP}, and nothing else: convert the model again"
        )
        raise ConfigError(message, param=QUANTIZATION_CONFIG)
    return {key: value for key, value in hf.items() if key != QUANTIZATION_CONFIG}, kind


def _take_stored_form(
    hf: dict[str, Any], family: Family
) -> tuple[dict[str, Any], StoredForm | None]:
    """The configuration without the `quantization_config` of another program, and the form of its weights.

    Raises:
        ConfigError: the form is not read; `param` is "quantization_config".
    """
    found = hf.get(QUANTIZATION_CONFIG)
    if found is None or QUANTIZATION_CONFIG in family.keys:
        return hf, None
    if not isinstance(found, dict):
        raise refusal(QUANTIZATION_CONFIG, "must be an object", found)
    if family.sums is not None:
        problem = (
            f"is not read for {family.name}, whose layers share weights; use the plain weights"
        )
        raise refusal(QUANTIZATION_CONFIG, problem, found)
    left = {key: value for key, value in hf.items() if key != QUANTIZATION_CONFIG}
    return left, read_stored_form(found)


def quantization_config(kind: Quantization) -> dict[str, object]:
    """The entry of config.json beside quantised weights of our own."""
    size = {"group_size": INT4_GROUP} if kind == "int4" else {}
    return {"quant_method": QUANT_METHOD, "weights": kind, **size}


def _check_end_tokens(name: str, tokens: tuple[int, ...], config: ModelConfig) -> None:
    outside = [token for token in tokens if token >= config.vocab_size][:3]
    if outside:
        message = f"{name}: eos_token_id {short(outside)} is outside the vocabulary of {config.vocab_size} tokens"
        raise ConfigError(message, param="eos_token_id")


def refused() -> dict[str, tuple[str, str]]:
    """The types of models without a family, each with the nearest family and the missing part."""
    text = (
        resources.files("orca_jax.model.families")
        .joinpath("refused.json")
        .read_text(encoding="utf-8")
    )
    return {
        kind: (near, missing)
        for kind, (near, missing) in json.loads(text).items()
        if kind not in FAMILIES
    }


def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("orca_jax.model").joinpath("presets.json").read_text(encoding="utf-8")
    presets: dict[str, dict[str, Any]] = json.loads(text)
    return presets


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError; `param` is "model"."""
    if not path.is_file():  # checked before opening: a pipe would block, and a device may never end
        raise ConfigError(f"{path} is missing", param="model")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes", param="model")
    try:
        value = json_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", param="model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must contain a JSON object", param="model")
    return value
