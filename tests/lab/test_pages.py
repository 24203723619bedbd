"""Numbers between markers in pages are read from results, and written again."""

import json
from pathlib import Path

import pytest

from lab.pages.command import renewed
from orca_jax.values.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "results.json").write_text(json.dumps({"ratio": 37.57, "curve": [[1.0, 2.0]]}))
    return tmp_path


def test_a_number_is_written_again(root: Path) -> None:
    page = "a <!-- from lab: results ratio .1f -->1<!-- end --> b <!-- from lab: results curve 0 1 .0f --><!-- end -->"
    assert renewed(page, root) == (
        "a <!-- from lab: results ratio .1f -->37.6<!-- end --> b <!-- from lab: results curve 0 1 .0f -->2<!-- end -->"
    )
    assert renewed(renewed(page, root), root) == renewed(page, root)


@pytest.mark.parametrize(
    "what", ["nowhere ratio .1f", "results size .1f", "results ratio .1q", "results curve 7 .1f"]
)
def test_a_wrong_marker_is_named(what: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        renewed(f"<!-- from lab: {what} -->1<!-- end -->", root)
