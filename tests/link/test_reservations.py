"""The warning at start of a scheduler that reserves the longest output of a request."""

from typing import Any

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.link.process import warn_of_reservations
from orca_jax.values.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"scheduler": "orca", "n_slots": 250},
            "100 of 250 slots, so at most 2 of them run at once in 4 rows",
        ),
        ({"scheduler": "orca"}, ""),  # all rows may hold a whole context
        ({"scheduler": "chunked", "num_pages": 16}, ""),
    ],
)
def test_a_chat_without_a_limit(
    settings: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        "preset:toy", max_num_seqs=4, max_model_len=100, progress=False, **settings
    )
    with build_engine(config) as built:
        warn_of_reservations(built)
    assert ("max_completion_tokens" in caplog.text) == bool(text) and text in caplog.text
