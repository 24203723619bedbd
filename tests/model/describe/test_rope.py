"""The options of rotary positions, in their old and new spellings."""

import pytest

from orca_jax.model.describe import config_from_hf
from orca_jax.values.layer_config import RopeConfig
from tests.model.describe.options import GEMMA3, LLAMA


def test_layers_with_a_window_have_other_rotary_positions() -> None:
    """Gemma 3, in the spellings of transformers 4 and 5; a factor stretches the layers without a window alone."""
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    parts = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    local, whole = RopeConfig(theta=100.0), RopeConfig(theta=5e5, kind="linear", factor=8.0)
    for options in (old, {"rope_parameters": parts}):
        kinds = config_from_hf({**GEMMA3, "max_position_embeddings": 512, **options}).layers
        assert [kind.rope for kind in kinds[:7]] == [local] * 5 + [whole, local]
        assert {kind.window for kind in kinds} == {None}, (
            "they differ even if the window has no effect"
        )
    plain = config_from_hf(GEMMA3)
    assert [kind.rope.theta for kind in plain.layers[:6] if kind.rope] == [1e4] * 5 + [1e6]
    assert plain.rope == RopeConfig(theta=1e6)


def test_rotated_shares() -> None:
    neox = {"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 8}
    scaled = {
        "rope_parameters": {
            "rope_type": "default",
            "partial_rotary_factor": 1.0,
            "rope_theta": 500.0,
        }
    }
    for options, dim, theta in (
        ({}, 16, 1e4),
        ({"rotary_pct": 0.5, "rotary_emb_base": 100}, 32, 100.0),
        (scaled, None, 500.0),
    ):
        rope = config_from_hf({**neox, "rotary_pct": 0.25, **options}).rope
        assert rope is not None and (rope.rotated_dim, rope.theta) == (dim, theta)
    long = {"type": "su", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    sizes = {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 8192,
    }
    phi = config_from_hf({"model_type": "phi3", **sizes, "rope_scaling": long})
    assert phi.rope is not None and (phi.rope.kind, phi.rope.rotated_dim, phi.max_positions) == (
        "longrope",
        48,
        4096,
    )


def test_old_and_new_spellings_of_rope_agree() -> None:
    kind = {"factor": 4.0}
    old = config_from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", **kind}})
    new = config_from_hf(
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, **kind}}
    )
    assert old == new
    assert new.rope is not None
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == ("linear", 5e5, 4.0)


def test_of_two_spellings_rope_scaling_counts(caplog: pytest.LogCaptureFixture) -> None:
    """All of `rope_parameters` is dropped, as in transformers, its `rope_theta` too."""
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    both = config_from_hf(
        {**LLAMA, "rope_parameters": new, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    )
    assert both.rope == RopeConfig(theta=10000.0, kind="dynamic", factor=2.0)
    assert "rope_scaling replaces rope_parameters" in caplog.text
    for nothing in (None, {}):
        assert config_from_hf(
            {**LLAMA, "rope_parameters": new, "rope_scaling": nothing}
        ).rope == RopeConfig(theta=5e5, kind="linear", factor=4.0)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_the_outer_original_length_counts(kind: str) -> None:
    numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": kind, "original_max_position_embeddings": 64, **numbers, **factors}
    for outer, expected in ((None, 64), (16, 16)):
        config = config_from_hf(
            {**LLAMA, "rope_parameters": rope, "original_max_position_embeddings": outer}
        )
        assert config.rope is not None and config.rope.original_max_position == expected
        assert config.max_positions == (expected if kind == "longrope" else 2048)


def test_changing_frequencies_limit_the_context() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **factors}
    assert (
        config_from_hf(
            {**LLAMA, "max_position_embeddings": 131072, "rope_parameters": rope}
        ).max_positions
        == 4096
    )
