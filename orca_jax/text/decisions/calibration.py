"""Calibration files: a temperature and a prior of the labels for each kind of question."""

import json
import math
from pathlib import Path
from typing import Any, get_args

from orca_jax.text.decisions.questions import MAX_OPTIONS, QuestionKind
from orca_jax.text.decisions.reads import TEMPERATURE, FitsByKind, Fitted
from orca_jax.text.settings_file import read_text
from orca_jax.values.errors import ConfigError

MAX_BYTES = 2**20
VERSION = 1
PARAM = "calibration"


def load_calibration(path: str | Path) -> FitsByKind:
    """Read a file of `orca-jax calibrate`.

    Raises:
        ConfigError: the file cannot be read, or has something else in it; `param` is "calibration".
    """
    text = read_text(Path(path), MAX_BYTES, PARAM)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is not JSON: {error}") from None
    kinds = values.get("kinds") if isinstance(values, dict) else None
    if not isinstance(kinds, dict) or values.get("version") != VERSION:
        raise _wrong(path, f"must be an object with version {VERSION} and kinds")
    found: dict[QuestionKind, Fitted] = {}
    for kind in get_args(QuestionKind):
        if kind in kinds:
            found[kind] = _fitted(kinds[kind], path, kind)
    if len(found) < len(kinds):
        raise _wrong(path, f"may have the kinds {', '.join(get_args(QuestionKind))} and no others")
    return found


def _fitted(values: Any, path: str | Path, kind: str) -> Fitted:
    if not isinstance(values, dict) or not TEMPERATURE.has(values.get("temperature")):
        raise _wrong(path, f"needs a temperature of {kind}, {TEMPERATURE.text}")
    bias = values.get("bias", [])
    is_list = isinstance(bias, list) and len(bias) <= MAX_OPTIONS
    if not is_list or not all(type(each) in (int, float) and math.isfinite(each) for each in bias):
        raise _wrong(path, f"has a bias of {kind} that is not a list of finite numbers")
    return Fitted(float(values["temperature"]), tuple(map(float, bias)))


def _wrong(path: str | Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}; make it by orca-jax calibrate", param=PARAM)
