"""Where a model's files lie, by what `--model` says of it, and a length ranker's."""

from pathlib import Path

from orca_jax.errors import ConfigError

DEMO = "demo"
DEMO_RANKER = "demo_length_ranker"
PRESET_PREFIX = "preset:"


def is_preset(model: str) -> bool:
    """Whether this names a packaged configuration rather than a directory."""
    return model.startswith(PRESET_PREFIX)


def model_directory(model: str) -> str:
    """The directory; empty for a preset, which has none. Raises ConfigError."""
    if model == DEMO:
        return str(demo_directory())
    return "" if is_preset(model) else model


def demo_directory() -> Path:
    """The bundled model: in the source tree, or in the installed package.

    Raises:
        ConfigError: neither has it.
    """
    found = _bundled(DEMO, "config.json")
    if found is None:
        raise ConfigError("this installation lacks the demo model; name a model directory or a preset", param="model")
    return found


def ranker_directory(name: str) -> Path:
    """Where a length ranker lies: "demo" is the bundled one, anything else a directory.

    Raises:
        ConfigError: it is not there.
    """
    found = _bundled(DEMO_RANKER, "params/_METADATA") if name == DEMO else Path(name)
    if found is None or not found.is_dir():
        message = f'length_predictor must be "bound", "quantiles", "demo" or a ranker\'s directory, got {name!r}'
        raise ConfigError(message, param="length_predictor")
    return found


def _bundled(folder: str, file: str) -> Path | None:
    """A checkpoint of ours, known by a file in it: in the installed package, or in the source tree."""
    here = Path(__file__).parent
    places = (here / f"_{folder}", here.parent / "checkpoints" / folder)
    return next((place for place in places if (place / file).is_file()), None)
