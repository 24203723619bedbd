"""Files of the package: directories of models and rankers, with a demo of each, and a digest of the source."""

import hashlib
from functools import cache
from pathlib import Path

from orca_jax.checks import did_you_mean
from orca_jax.errors import ConfigError

DEMO = "demo"
DEMO_RANKER = "demo_length_ranker"
PRESET_PREFIX = "preset:"


def is_preset(model: str) -> bool:
    """Return True if the name is a packaged configuration instead of a directory."""
    return model.startswith(PRESET_PREFIX)


def model_directory(model: str) -> str:
    """Return the directory of a model, or an empty string for a preset.

    Raises:
        ConfigError: it is the demo model, and this installation does not contain it.
    """
    if model == DEMO:
        return str(demo_directory())
    return "" if is_preset(model) else model


def demo_directory() -> Path:
    """Return the directory of the demo model in the installed package or in the source tree.

    Raises:
        ConfigError: neither of them contains it.
    """
    found = _bundled(DEMO, "config.json")
    if found is None:
        message = "this installation does not contain the demo model; give a model directory or a preset"
        raise ConfigError(message, param="model")
    return found


def ranker_directory(name: str) -> Path:
    """Return the directory of a length ranker; "demo" is the one that comes with the package.

    Raises:
        ConfigError: there is no such directory.
    """
    found = _bundled(DEMO_RANKER, "params/_METADATA") if name == DEMO else Path(name)
    if found is None or not found.is_dir():
        message = f'length_predictor must be "bound", "quantiles", "demo" or the directory of a ranker, got {name!r}'
        hint = did_you_mean(name, ("bound", "quantiles", DEMO))
        raise ConfigError(message + hint, param="length_predictor")
    return found


def _bundled(folder: str, file: str) -> Path | None:
    """Return the first folder with this file in it: in the installed package, then in the source tree."""
    here = Path(__file__).parent
    places = (here / f"_{folder}", here.parent / "checkpoints" / folder)
    return next((place for place in places if (place / file).is_file()), None)


@cache
def code_digest() -> str | None:
    """A digest of the source of this package, or None if there are no source files."""
    return digest_of(Path(__file__).parent)


def digest_of(folder: Path) -> str | None:
    """A digest of all Python files in a folder, with their places, or None if there are none."""
    files = sorted(folder.rglob("*.py"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
