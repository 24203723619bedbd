"""Where a model's files lie, by what `--model` says of it."""

from pathlib import Path

from orca_jax.errors import ConfigError

DEMO = "demo"
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
    here = Path(__file__).parent
    for directory in (here / "_demo", here.parent / "checkpoints" / "demo"):
        if (directory / "config.json").is_file():
            return directory
    raise ConfigError("this installation lacks the demo model; name a model directory or a preset", param="model")
