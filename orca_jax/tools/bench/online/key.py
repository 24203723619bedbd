"""The API key of a measured server, from a flag or from the variable of OpenAI's client libraries."""

import os

from orca_jax.values.errors import ConfigError

KEY_VARIABLE = "OPENAI_API_KEY"


def read_key(flag: str | None) -> str | None:
    """Return the API key of the flag or else of the environment. Raises ConfigError."""
    key = flag if flag is not None else os.environ.get(KEY_VARIABLE) or None
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        source = "api_key" if flag is not None else f"api_key, read from {KEY_VARIABLE},"
        raise ConfigError(
            f"{source} must consist of printable ASCII characters without blanks", param="api_key"
        )
    return key
