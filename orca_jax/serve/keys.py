"""API keys of the settings, read before anything that takes long is imported."""

import logging
import os
import re
import stat
from pathlib import Path

from orca_jax.errors import ConfigError, reason_of
from orca_jax.server_config import ServerConfig

_KEY = re.compile(r"[!-~]+")  # characters that a header carries unchanged

logger = logging.getLogger(__name__)


def check_keys(config: ServerConfig) -> None:
    """Check all keys of the settings. Raises ConfigError as `read_keys` does."""
    for key in config.api_key:
        _check(key, "api_key", "--api-key")
    for param, path in (("api_key_file", config.api_key_file), ("admin_key_file", config.admin_key_file)):
        if path is not None:
            _keys_in(Path(path), param)


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of `--api-key` and `--api-key-file`; empty if neither was given.

    Raises:
        ConfigError: a key is malformed, or the file cannot be read or holds no key. The message never shows a key.
    """
    keys = list(config.api_key)
    for key in keys:
        _check(key, "api_key", "--api-key")
    if config.api_key_file is not None:
        keys += read_key_file(Path(config.api_key_file), "api_key_file")
    return tuple(dict.fromkeys(keys))


def read_key_file(path: Path, param: str) -> list[str]:
    """The keys of a file, one per line. Raises ConfigError as `read_keys` does, with `param`."""
    keys, is_public = _keys_in(path, param)
    if is_public:
        logger.warning("every user of this machine can read %s; run chmod 600 on it to keep its keys secret", path)
    return keys


def _keys_in(path: Path, param: str) -> tuple[list[str], bool]:
    """The keys of a file, and whether every user can read it."""
    flag = f"--{param.replace('_', '-')}"
    try:
        with path.open(encoding="utf-8-sig") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not valid UTF-8"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}", param=param) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; write one key per line", param=param)
    for key in keys:
        _check(key, param, f"{flag} {path}")
    return keys, stat.S_ISREG(mode) and bool(mode & stat.S_IROTH)


def _check(key: str, param: str, where: str) -> None:
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key must consist of printable ASCII characters without spaces", param=param)
