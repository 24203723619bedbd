"""Programs for accelerators as users compile them: their sizes and times are what is measured."""

from collections.abc import Iterator

import pytest

from tests.programs import compiled_with
from tests.run.kept import forgetting


@pytest.fixture(autouse=True, scope="package")
def as_users_do() -> Iterator[None]:
    # A program for a device that this machine lacks can be kept, but not read.
    with forgetting(), compiled_with(optimised=True):
        yield
