"""Reads the sampling defaults of a model from generation_config.json. Its end tokens are read with the model.

Old models have them in config.json, which transformers and vLLM read if there is no generation_config.json.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_jax.helpers.bundled import SMOLLM2_FILE, is_preset
from orca_jax.text.settings_file import read_settings
from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import SamplingParams

NAME = "generation_config.json"
OLD_NAME = "config.json"
OVERRIDES = "override_generation_config"
MAX_NUMBER = 2**53  # absolute value; no field allows more

# Key of the file -> field of SamplingParams, and its type.
_FIELDS: Mapping[str, tuple[str, type[float] | type[int]]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_new_tokens": ("max_tokens", int),
}

_KEYS: Mapping[str, str] = {name: key for key, (name, _) in _FIELDS.items()}

# Programs of the time wrote all their defaults into config.json. These are not a choice of the model.
_OLD_DEFAULTS: Mapping[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "do_sample": False,
}

# Keys without a counterpart here, and the values without effect on the tokens of transformers.
_OTHERS: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "diversity_penalty": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "suppress_tokens": (None,),
    "top_h": (None,),
    "typical_p": (None, 1),
    "watermarking_config": (None,),
}

# chosen in docs/smollm2.md; its file has none
_OF_SMOLLM2: Mapping[str, float] = {"temperature": 0.0}

logger = logging.getLogger(__name__)


def read_generation_defaults(
    source: str, setting: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, float | int]:
    """Return the defaults of a request's sampling parameters, by the names of `SamplingParams`.

    Null values are ignored. `do_sample: false` means greedy sampling, so temperature 0. Other keys configure
    transformers, and are ignored. A warning names those with an effect on its tokens, such as beams.

    Args:
        source: the model directory; empty or "preset:<name>" for a preset.
        setting: "auto" reads the file in `source`, or else its config.json; "none" and "vllm" read nothing, others are
            a directory or a file.
        overrides: values that replace the values of the file, by key; null removes a value.

    Raises:
        ConfigError: the file or one of its values is wrong; the message names both. `param` is "generation_config", or
            "override_generation_config" for an override.
    """
    found = _of_file(source, setting)
    if overrides:
        found = {name: number for name, number in found.items() if _KEYS[name] not in overrides}
        found |= _defaults(overrides, OVERRIDES)
    return found


def _of_file(source: str, setting: str) -> dict[str, float | int]:
    """The defaults of a model's file. Raises ConfigError."""
    if setting in ("none", "vllm") or (setting == "auto" and (not source or is_preset(source))):
        return {}
    if setting == "auto" and Path(source).name == SMOLLM2_FILE:
        return dict(_OF_SMOLLM2)
    directory = Path(source if setting == "auto" else setting)
    path = directory if directory.is_file() and setting != "auto" else directory / NAME
    if setting != "auto" and not path.is_file():
        message = f'{path} is missing; generation_config must be "auto", "none" or a directory with {NAME}'
        raise ConfigError(message, param="generation_config")
    if setting == "auto" and not path.exists():
        path = directory / OLD_NAME
    values = read_settings(path, param="generation_config")
    if path.name == OLD_NAME:
        values = {key: value for key, value in values.items() if _OLD_DEFAULTS.get(key) != value}
    return _defaults(values, path)


def _defaults(values: Mapping[str, Any], path: Path | str) -> dict[str, float | int]:
    """The defaults that values of a file, or of the setting of this name, come to. Raises ConfigError."""
    _warn(values, path)
    defaults = {
        name: _number(values[key], kind, key, path)
        for key, (name, kind) in _FIELDS.items()
        if key in values
    }
    found = {name: number for name, number in defaults.items() if number is not None}
    if _is_greedy(values, path):
        found["temperature"] = 0.0
    _check(found, path)
    if found:
        logger.info("sampling defaults of the model: %s", found)
    return found


def _warn(values: Mapping[str, Any], path: Path | str) -> None:
    ignored = [key for key, neutral in _OTHERS.items() if values.get(key) not in neutral]
    if path == OVERRIDES:  # of a file they configure transformers
        ignored += sorted(values.keys() - {*_FIELDS, *_OTHERS, "do_sample"})
    if ignored:
        logger.warning("%s: %s: ignored; a request sets what it needs", path, ", ".join(ignored))


def _number(
    value: object, kind: type[float] | type[int], key: str, path: Path | str
) -> float | int | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER:
        number = kind(value)
        if number == value:
            return number
    what = "an integer" if kind is int else "a number"
    raise ConfigError(f"{path}: {key} must be {what}, got {short(value)}", param=_param(path))


def _is_greedy(values: Mapping[str, Any], path: Path | str) -> bool:
    value = values.get("do_sample")
    if value is not None and not isinstance(value, bool):
        raise ConfigError(
            f"{path}: do_sample must be true or false, got {short(value)}", param=_param(path)
        )
    return value is False


def _check(defaults: Mapping[str, float | int], path: Path | str) -> None:
    """Check the ranges, as for the parameters of a request."""
    for name, value in defaults.items():
        field: dict[str, Any] = {name: value}
        try:
            SamplingParams(**field)
        except RequestError as error:
            remedy = "correct it"
            if path != OVERRIDES:
                remedy = "correct the file, or use --generation-config none"
            message = f"{path}: {_KEYS[name]}: {error.message}; {remedy}"
            raise ConfigError(message, param=_param(path)) from None


def _param(path: Path | str) -> str:
    """The setting to change."""
    return OVERRIDES if path == OVERRIDES else "generation_config"
