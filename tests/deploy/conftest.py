"""Fixtures of other folders."""

from tests.serve.conftest import process_as_before

__all__ = ["process_as_before"]
