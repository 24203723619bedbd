"""Programs for accelerators as users compile them: their sizes and times are what is measured."""

from collections.abc import Iterator

import pytest

from tests.programs import compiled_with


@pytest.fixture(autouse=True, scope="package")
def as_users_do() -> Iterator[None]:
    with compiled_with(optimised=True):
        yield
