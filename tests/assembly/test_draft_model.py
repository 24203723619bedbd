"""The start of a draft model, up to its programs."""

from typing import Any

import jax
import pytest

from orca_jax.assembly.choices import Drafts
from orca_jax.assembly.described import DraftModel
from orca_jax.model.describe import read_model_config
from orca_jax.values.config import AttentionName, ExecutorConfig
from orca_jax.values.startup import StartTimes

DRAFTS = Drafts(num_tokens=3, max_bs=2, num_requests=2, overlaps=False, ngrams=(1, 2), model="demo")


class Started(Exception):
    """Ends the start before anything is compiled."""


@pytest.mark.parametrize("wanted", [None, "gather"])
def test_a_draft_model_has_the_attention_of_its_settings(
    monkeypatch: pytest.MonkeyPatch, wanted: AttentionName | None
) -> None:
    """It does not use a library of products that another engine has loaded."""
    seen: list[ExecutorConfig] = []

    def start(placed: Any, shapes: ExecutorConfig, *args: Any, **options: Any) -> None:
        seen.append(shapes)
        raise Started

    monkeypatch.setattr("orca_jax.assembly.executor.start_executor", start)
    model = read_model_config("preset:gpt2", None)
    draft = DraftModel("preset:gpt2", model, 64, DRAFTS, 0, False)
    with pytest.raises(Started):
        draft.start(jax.devices()[:1], "float32", 8, wanted, StartTimes(), None)
    assert [(shapes.attention_implementation, shapes.has_library) for shapes in seen] == [
        (wanted, False)
    ]
