"""The version of this process, which all processes of a cluster must share."""

from functools import cache
from importlib.metadata import version

from orca_jax.helpers.bundled import code_digest


@cache
def own_version() -> str:
    """The versions of the package and of JAX."""
    return f"{version('orca-jax')} with JAX {version('jax')}"


@cache
def own_code() -> str:
    """A digest of the source of the package; empty if there are no source files."""
    return code_digest() or ""
