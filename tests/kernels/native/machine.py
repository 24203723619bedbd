"""The library of products on this machine, for the tests that need it."""

import pytest

from orca_jax.kernels.native import Library, load_library
from tests.project.source import ROOT

FOUND = load_library(str(ROOT / ".pytest_cache" / "native"))  # for later runs too; its name differs with its code
needs_library = pytest.mark.skipif(FOUND is None, reason="needs Linux, AVX2 and a C compiler")


def library_of(dtype: str = "float32") -> Library:
    """The library; skips the test if it does not multiply a type."""
    if FOUND is None or (dtype == "bfloat16" and not FOUND.has_bfloat16):
        pytest.skip(f"no library of products in {dtype}")
    return FOUND
