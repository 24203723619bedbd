"""Models with states: their configurations, and the refusal to serve them."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.described import Described, describe_draft
from orca_jax.assembly.support import quantised
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.model.families import FAMILIES
from orca_jax.model.stages import LayerSpan, of_span
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import ResidualFactors, SumFactors
from orca_jax.values.speculation import SpeculativeConfig
from tests.assembly.divisible import check_divisible
from tests.model.states.hybrids import write

LFM3: dict[str, Any] = {"model_type": "lfm3"}


def test_the_pattern_of_lfm3() -> None:
    """Layers 2, 6, ... see all tokens, layers 4, 8, ... a window, and the others have convolutions."""
    config = config_from_hf(LFM3)
    full, conv, windowed = config.layers[2], config.layers[0], config.layers[4]
    assert (full.mixer, full.window, full.rope.kind, full.rope.share) == (
        "attention",
        None,
        "proportional",
        0.5,
    )
    assert (windowed.mixer, windowed.window, windowed.rope.theta) == ("attention", 256, 1e4)
    assert (
        conv.mixer == "short_conv"
        and config.short_conv is not None
        and config.short_conv.width == 7
    )
    assert config.layers_with("attention") == tuple(range(2, 24, 2))
    assert config.mixers == ("short_conv", "attention")
    span = LayerSpan(5, 9, 24)
    assert of_span(config, span).layers == config.layers[5:9]


def test_the_factors_of_minimax() -> None:
    factors = {"full_attn_alpha_factor": 3.5, "linear_attn_beta_factor": 0.5, "mlp_beta_factor": 2}
    config = config_from_hf({"model_type": "minimax", "num_hidden_layers": 3, **factors})
    assert [kind.mixer for kind in config.layers] == [
        "attention",
        "linear_attention",
        "attention",
    ]
    assert config.residual_factors == ResidualFactors(
        SumFactors(3.5, 1), SumFactors(1, 0.5), SumFactors(1, 2)
    )


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        (
            {"layer_types": ["conv", "mamba"], "num_hidden_layers": 2},
            "layer_types",
            "full_attention, sliding_attention or conv",
        ),
        (
            {"sliding_window": None},
            "sliding_window",
            "must be a positive integer for layers with sliding_attention",
        ),
        ({"conv_L_cache": 1}, "conv_L_cache", "must be at least 2"),
        ({"hidden_act": "gelu"}, "hidden_act", "must be silu"),
        ({"rope_theta": 1e6}, "rope_theta", "rope_parameters has an object for each kind of layer"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters",
            "must have sliding_attention",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}
                }
            },
            "partial_rotary_factor",
            "must be at most 1",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}
                }
            },
            "partial_rotary_factor",
            "must be 1.0",
        ),
    ],
)
def test_refused(options: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} .*{problem}") as caught:
        config_from_hf({**LFM3, **options})
    assert caught.value.param == key


def test_other_families_have_no_proportional_positions() -> None:
    with pytest.raises(
        ConfigError,
        match="rope_type must be one of default, dynamic, linear, llama3, longrope, yarn,",
    ):
        config_from_hf({"model_type": "llama", "rope_parameters": {"rope_type": "proportional"}})


def test_convolutions_are_shared_by_channels() -> None:
    config = config_from_hf(
        {**LFM3, "hidden_size": 18, "num_attention_heads": 4, "intermediate_size": 16}
    )
    with pytest.raises(ConfigError, match="does not divide 18 channels of convolutions"):
        check_divisible(config, 4)


SPECULATION = SpeculativeConfig("ngram", 2)


@pytest.mark.parametrize("name", ["lfm3-0"])
@pytest.mark.parametrize(
    ("settings", "reason"), [({"speculative_config": SPECULATION}, "cannot go back")]
)
def test_what_states_cannot_do(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write(name, tmp_path)
    model, (setting,) = read_model_config(tmp_path), settings
    assert quantised(EngineConfig(str(tmp_path)), model) == model
    with pytest.raises(
        ConfigError, match=f"{setting} does not cover {model.family}, .*{reason}"
    ) as caught:
        quantised(EngineConfig(str(tmp_path), **settings), model)
    assert caught.value.param == setting


def test_a_draft_model_has_no_states(tmp_path: Path) -> None:
    write("lfm3-0", tmp_path)
    config = EngineConfig(
        speculative_config=SpeculativeConfig("draft_model", 2, model=str(tmp_path))
    )
    drafts, words, model = choices_of(config).drafts, ByteTokenizer(), read_model_config(tmp_path)
    target = Described(
        config, "", "", model, words, GrammarFactory(words, model.vocab_size, ()), 32
    )
    assert drafts is not None
    with pytest.raises(
        ConfigError, match=r"draft model .*: lfm3 keeps states, which cannot go back"
    ) as caught:
        describe_draft(EngineConfig(str(tmp_path)), drafts, target)
    assert caught.value.param == "speculative_config"


def test_a_model_needs_a_layer_with_attention() -> None:
    model = config_from_hf({**LFM3, "layer_types": ["conv"] * 24})
    with pytest.raises(
        ConfigError,
        match="lfm3: a model needs a layer with attention, and all layers have short_conv",
    ):
        quantised(EngineConfig(), model)


def test_families_with_states_are_named_as_supported() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_hf({"model_type": "unknown"})
    assert caught.value.message.split("only ")[1].split(", ") == sorted(FAMILIES)
