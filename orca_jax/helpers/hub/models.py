"""Models of the Hugging Face Hub: a name such as ORG/NAME becomes a directory of the library's cache.

Downloaded are the files that this package reads: settings, tokenizer, chat template and safetensors. Pickled weights
and Python code are never downloaded. `huggingface_hub` keeps the cache, reads HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE, and is imported only for a name of the Hub.
"""

import errno
import glob
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orca_jax.helpers.console import has_terminal, line_without_bars
from orca_jax.values.errors import ConfigError, system_message

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SETTINGS = (
    "adapter_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""The small files of a model directory that are read, beside the index of the weights."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_INDEX_BYTES = 32 * 2**20
_MAX_SETTINGS_BYTES = 256 * 2**20  # tokenizers with large vocabularies have 35 MB
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_FOLDER = "choose another folder with --download-dir or HF_HOME"

BUCKET_DRIVERS = {"gs": "gcs", "s3": "s3", "http": "http", "https": "http"}
"""The driver of TensorStore for each scheme of a bucket or of a web server."""


class HubModel(NamedTuple):
    """A model on the Hub.

    Attributes:
        name: such as "ORG/NAME".
        revision: a branch, a tag or a commit; None for the default branch.
        download_dir: the folder of the cache; None for that of the library.
        token: the token of an account; None for that of the library.
    """

    name: str
    revision: str | None = None
    download_dir: str | None = None
    token: str | None = None


def is_hub_name(model: str) -> bool:
    """Return True for a name such as ORG/NAME, unless there is a directory or file of this name."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def is_bucket(model: str) -> bool:
    """Return True for a name that begins with the scheme of a bucket or of a web server."""
    scheme, separator, _ = model.partition("://")
    return bool(separator) and scheme in BUCKET_DRIVERS


def download(
    model: HubModel, *, needs_weights: bool = True, param: str = "model", has_bars: bool = False
) -> Path:
    """Return the directory of a model in the cache, after the download of its missing files.

    The last part of the path is the commit. If that commit is given as the revision, and all of its files are in the
    cache, the network is not used. Otherwise the Hub is asked for the commit of the revision. If it cannot be reached,
    the commit known to the cache is taken.

    Args:
        model: the name and its place.
        needs_weights: False for the settings and the tokenizer alone.
        param: the setting with the name, for errors.
        has_bars: draw progress bars on a terminal.

    Raises:
        ConfigError: the model is missing, gated, without safetensors, or not in the cache while the Hub cannot be
            reached; an answer is refused or too slow (`answers`); or the disk is full. The message has the remedy.
    """
    try:
        names = (*SETTINGS, INDEX) if needs_weights else SETTINGS
        folder = _snapshot(model, names, _MAX_SETTINGS_BYTES, has_bars)
        if needs_weights:
            _download_weights(model._replace(revision=folder.name), folder, has_bars)
    except ConfigError as error:
        raise ConfigError(error.message, param=param) from error
    # the classes of transport errors are those of the library's HTTP client
    except Exception as error:
        raise _refusal(error, model, param) from error
    return folder


def _snapshot(model: HubModel, names: Iterable[str], max_bytes: int, has_bars: bool) -> Path:
    """Download the named files of a model, as far as it has them. None may have more than `max_bytes`."""
    from huggingface_hub import snapshot_download

    from orca_jax.helpers.hub.answers import checked_answers
    from orca_jax.helpers.hub.bars import HiddenBar, ShownBar

    with checked_answers(max_bytes):
        directory = snapshot_download(
            model.name,
            revision=model.revision,
            cache_dir=model.download_dir,
            token=model.token,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=ShownBar if has_bars and has_terminal() else HiddenBar,
        )
    return Path(directory)


def _download_weights(model: HubModel, folder: Path, has_bars: bool) -> None:
    """Download the weights of a commit that are not in `folder`."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(
            model.name, revision=model.revision, cache_dir=model.download_dir
        )
    # another program filled the cache: the loader finds what is missing
    except CachedRepoTreeNotFoundError:
        return
    sizes = {file.path: file.size for file in tree}
    names = [SINGLE] if SINGLE in sizes else sorted(_listed(folder / INDEX) & sizes.keys())
    if not names:
        raise _without_weights(model.name, sizes)
    missing = [name for name in names if not (folder / name).is_file()]
    total = sum(sizes[name] for name in missing)
    if missing:
        free = shutil.disk_usage(folder).free
        if total > free:
            message = f"{model.name} needs {_gb(total)} more, and the disk of {folder} has {_gb(free)} free"
            raise ConfigError(f"{message}; free some space, or {_OTHER_FOLDER}")
        if has_bars:
            line_without_bars(f"downloading {len(missing)} files of {model.name}, {_gb(total)}")
    _snapshot(model, names, max(sizes[name] for name in names), has_bars)


def _listed(index: Path) -> set[str]:
    """The files named by an index of weights; none if it cannot be read, which the loader reports."""
    try:
        if not index.is_file() or index.stat().st_size > _MAX_INDEX_BYTES:
            return set()
        return {
            str(name)
            for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _without_weights(name: str, files: Iterable[str]) -> ConfigError:
    pickled = sorted(file for file in files if file.endswith(_PICKLED))
    if pickled:
        return ConfigError(
            f"{name} has only pickled weights ({', '.join(pickled[:3])}), and loading them may run code; choose a "
            "model with safetensors"
        )
    return ConfigError(f"{name} has neither {SINGLE} nor {INDEX}; choose a model with safetensors")


def _refusal(error: Exception, model: HubModel, param: str) -> ConfigError:
    """The error of this package for one of the library."""
    from huggingface_hub import constants, errors

    name = model.name
    endpoint = constants.ENDPOINT
    cache = model.download_dir or constants.HF_HUB_CACHE
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    match error:
        case errors.RevisionNotFoundError():
            if model.revision is not None:
                param = "revision"
            message = f"{name} has no revision {model.revision or 'main'!r}; give a branch, a tag or a commit of it"
        case errors.GatedRepoError():
            message = f"{name} is gated: accept its licence at {endpoint}/{name}, then set HF_TOKEN to your token"
        case errors.RepositoryNotFoundError():
            message = (
                f"{name} is neither a directory nor a model at {endpoint} that this account can read; check the name, "
                "or set HF_TOKEN for a private model"
            )
        case errors.LocalEntryNotFoundError() if constants.is_offline_mode():
            message = (
                f"{name} is not a directory, it is not complete in the cache {cache}, and HF_HUB_OFFLINE is set; start "
                "once without HF_HUB_OFFLINE, or give a directory"
            )
        case errors.LocalEntryNotFoundError():
            message = (
                f"{name} is not a directory, it is not complete in the cache {cache}, and {endpoint} cannot be "
                f"reached ({reason}); check the network, HF_ENDPOINT and HTTPS_PROXY, or give a directory"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            message = f"{name} cannot be downloaded: the disk of {cache} is full; free some space, or {_OTHER_FOLDER}"
        case OSError(errno=int()):
            message = f"{name} cannot be downloaded ({system_message(error)}); {_OTHER_FOLDER}"
        case _:
            message = f"the download of {name} from {endpoint} failed ({reason}); start again: complete files are kept"
    return ConfigError(message, param=param)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
