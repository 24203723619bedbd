"""The options of each family give the numbers of the decoder, as in transformers."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from orca_jax.model.describe import config_from_hf
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.family import SHARED, AskedConfig, Family
from orca_jax.model.families.images.texts import IMAGE_TEXTS
from orca_jax.model.families.keys import FIXED, HARMLESS, resolve_aliases
from orca_jax.model.families.types import TYPES
from orca_jax.model.stages import LayerSpan, of_span
from orca_jax.values.errors import ConfigError
from tests.model.describe.options import GEMMA2, GEMMA3, GPT2, QWEN2
from tests.model.recorded import record
from tests.model.saved.record import load as load_saved

NOT_RECORDED = {"kimi_k2"}


@cache
def records() -> dict[str, list[dict[str, Any]]]:
    """Configurations of transformers, by the name of a record."""
    found = {name: [model.config for model in record.load(name)] for name in record.names()}
    for kind, saved in load_saved().items():
        found[f"saved {kind}"] = [saved.default, saved.config]
    return found


def test_windows() -> None:
    """The rules of transformers: which key decides, and which values mean no window."""

    def window(family: str, **options: object) -> int | None:
        config = config_from_hf({"model_type": family, "max_position_embeddings": 8192, **options})
        (found,) = {kind.window for kind in config.layers}
        return found

    assert window("mistral") == 4096
    assert window("mistral", sliding_window=None) is None
    assert window("mistral", sliding_window=8192) is None, "no token is that far away"
    assert window("qwen2") is None
    for used, first, kinds, expected in (
        (True, 0, None, 64),
        (True, 32, None, None),
        (False, 0, None, None),
        (True, 0, ["full_attention"] * 32, None),
        (True, 28, ["sliding_attention"] * 32, 64),
    ):
        options = {"use_sliding_window": used, "max_window_layers": first, "layer_types": kinds}
        assert window("qwen3", sliding_window=64, **options) == expected
    assert window("qwen3_moe", sliding_window=64) is None
    assert (
        window("qwen3_moe", sliding_window=64, use_sliding_window=True, max_window_layers=48) == 64
    )
    assert window("qwen2_moe", sliding_window=64) is None
    assert window("phi3") is None
    assert window("phi3", sliding_window=2047) == 2047


def test_some_layers_have_a_window() -> None:
    """The pattern of transformers; layers that it gives no window see all tokens."""

    def windows(family: str, **options: object) -> list[int | None]:
        sizes = {"num_hidden_layers": 5, "max_position_embeddings": 8192, "sliding_window": 64}
        config = config_from_hf({"model_type": family, **sizes, **options})
        return [kind.window for kind in config.layers]

    full, sliding = "full_attention", "sliding_attention"
    types = [full, sliding, sliding, full, sliding]
    by_types = [None, 64, 64, None, 64]
    assert windows("qwen2", use_sliding_window=True, max_window_layers=3) == [None] * 3 + [64] * 2
    for family in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        used = (
            {"use_sliding_window": True, "max_window_layers": 1}
            if family.startswith("qwen")
            else {}
        )
        assert windows(family, layer_types=types, **used) == by_types
    assert windows("gemma2") == [64, None, 64, None, 64]
    assert windows("gemma3_text") == [64] * 5
    assert windows("gemma3_text", num_hidden_layers=8) == [64] * 5 + [None] + [64] * 2
    assert windows("gemma3_text", sliding_window_pattern=3) == [64, 64, None, 64, 64]
    assert windows("gemma3_text", sliding_window_pattern=10**9) == [64] * 5
    assert windows("gemma2", sliding_window=8192) == [None] * 5, "no token is that far away"
    assert windows("gemma2", layer_types=[full] * 5, sliding_window=None) == [None] * 5


def test_a_stage_has_the_kinds_of_its_own_layers() -> None:
    config = config_from_hf({**GEMMA3, "num_hidden_layers": 15})
    for span in (LayerSpan(0, 4, 15), LayerSpan(4, 13, 15), LayerSpan(13, 15, 15)):
        assert of_span(config, span).layers == config.layers[span.start : span.stop]


def test_scales_and_caps_of_gemma() -> None:
    config = config_from_hf({**GEMMA2, "query_pre_attn_scalar": 144, "hidden_act": "is not read"})
    assert (config.score_scale, config.embedding_scale, config.norm_offset) == (
        1 / 12,
        2304**0.5,
        1.0,
    )
    assert (config.attention_soft_cap, config.logit_soft_cap, config.activation) == (
        50.0,
        30.0,
        "gelu_tanh",
    )
    none = config_from_hf(
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    )
    assert (none.attention_soft_cap, none.logit_soft_cap) == (None, None)
    assert config_from_hf(GEMMA3).logit_soft_cap is None
    assert config_from_hf(QWEN2).score_scale == 128**-0.5


def test_of_a_model_for_images_the_texts_are_read() -> None:
    text = {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    outer = {
        "vision_config": {"hidden_size": 1152},
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
    }
    nested = config_from_hf(
        {"model_type": "gemma3", "text_config": {**GEMMA3, **text, "eos_token_id": 1}, **outer}
    )
    assert nested == replace(
        config_from_hf({**GEMMA3, **text, "eos_token_id": [1, 106]}), family="gemma3"
    )
    with pytest.raises(ConfigError, match=r"text_config: .*must be"):
        config_from_hf({"model_type": "gemma3", "text_config": {"sliding_window": 0}})


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_asks_for_its_keys_whatever_their_values_are(family: Family) -> None:
    """A key that the least configuration is not asked for would be refused as unknown in another one."""
    recorded = records()
    found: list[dict[str, Any]] = []
    for configs in recorded.values():
        found += [config for config in configs if config["model_type"] == family.name]
    for config in found:
        asked = AskedConfig(resolve_aliases(config, family))
        try:
            family.config_from_hf(asked)
        except ConfigError:
            continue  # a default configuration whose values do not fit together
        assert asked.asked - SHARED <= family.keys
    assert found or family.name in NOT_RECORDED


def test_each_row_is_a_family() -> None:
    """But those of texts, which only models for images and texts name."""
    assert {*TYPES} == {*FAMILIES, *(family.name for family in IMAGE_TEXTS)}
    assert all(row.models and row.classes for row in TYPES.values())


def test_no_key_has_two_meanings() -> None:
    harmless = [key for keys in HARMLESS.values() for key in keys]
    assert len(harmless) == len(set(harmless))
    for family in FAMILIES.values():
        of_family = family.keys | family.fixed.keys() | family.aliases.keys()
        assert not set(harmless) & (SHARED | FIXED.keys() | of_family)


def test_gpt2_has_two_names_for_its_sizes() -> None:
    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "max_position_embeddings": 64,
    }
    config = config_from_hf({**GPT2, **sizes, "n_layer": 3})
    assert (config.embed_dim, config.num_heads, config.num_layers, config.max_positions) == (
        48,
        4,
        3,
        64,
    )
