"""Sampling defaults of a model directory."""

import json
from pathlib import Path

import pytest

from orca_jax.text.generation_config import read_generation_defaults
from orca_jax.values.errors import ConfigError
from tests.project.source import ROOT


def written(path: Path, content: object) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    (path / "generation_config.json").write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
        ),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"max_new_tokens": 256, "max_length": 20}, {"max_tokens": 256}),
        ({"temperature": None, "top_k": 20.0, "temperature_": "x"}, {"top_k": 20}),
        ({"temperature": 1, "do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.7, "do_sample": False}, {"temperature": 0.0}),
        ({"eos_token_id": [1, 2], "num_beams": 4, "cache_implementation": "hybrid"}, {}),
    ],
)
def test_what_is_taken(tmp_path: Path, content: object, expected: dict[str, float]) -> None:
    found = read_generation_defaults(written(tmp_path, content), "auto")
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        n: type(v) for n, v in expected.items()
    }


def test_where_it_is_read(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir(), other.mkdir()
    source = written(model, {"top_k": 1})
    written(other, {"top_k": 2})
    assert read_generation_defaults(source, "auto") == {"top_k": 1}
    assert (
        read_generation_defaults(source, "none") == read_generation_defaults(source, "vllm") == {}
    )
    for setting in (other, other / "generation_config.json"):
        assert read_generation_defaults(source, str(setting)) == {"top_k": 2}
    for preset in ("", "preset:toy"):
        assert read_generation_defaults(preset, "auto") == {}
        assert read_generation_defaults(preset, str(other)) == {"top_k": 2}
    assert read_generation_defaults(str(tmp_path), "auto") == {}
    with pytest.raises(ConfigError, match="is missing") as caught:
        read_generation_defaults(source, str(tmp_path / "nothing"))
    assert caught.value.param == "generation_config"
    assert read_generation_defaults(str(ROOT / "checkpoints" / "demo"), "auto") == {
        "temperature": 0.7,
        "top_p": 0.95,
    }


def test_old_models_have_them_in_their_configuration(tmp_path: Path) -> None:
    defaults = {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "do_sample": False,
    }
    config = {"model_type": "gpt2", "n_layer": 2, **defaults, "repetition_penalty": 1.2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_generation_defaults(str(tmp_path), "auto") == {"repetition_penalty": 1.2}
    assert read_generation_defaults(str(tmp_path), "none") == {}
    (tmp_path / "config.json").write_text(json.dumps({**config, "top_k": "5"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: top_k must be an integer"):
        read_generation_defaults(str(tmp_path), "auto")
    assert read_generation_defaults(written(tmp_path, {"top_k": 5}), "auto") == {"top_k": 5}


def test_ignored_keys_with_an_effect_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    neutral = {
        "num_beams": 1,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "cache_implementation": "hybrid",
    }
    assert read_generation_defaults(written(tmp_path, neutral), "auto") == {}
    assert not caplog.records
    assert (
        read_generation_defaults(
            written(tmp_path, {**neutral, "num_beams": 4, "min_length": [1]}), "auto"
        )
        == {}
    )
    assert "min_length, num_beams: ignored" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "0.7"}, "temperature must be a number, got '0.7'"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": 3}, "temperature must be a number in"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ('{"temperature": 1e999}', "temperature must be a number"),
        ('{"temperature": NaN}', "NaN is not a JSON number"),
        ('{"top_p": -Infinity}', "-Infinity is not a JSON number"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_k": -7}, "top_k must be"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2**63}, "max_new_tokens must be an integer"),
        ({"repetition_penalty": [1]}, "repetition_penalty must be a number"),
        ({"do_sample": 0}, "do_sample must be true or false"),
        ([], "must hold a JSON object"),
        ("{", "is not valid JSON"),
        ("[" * 200_000, "is not valid JSON"),
        (" " * (2**24 + 1), "more than 16777216 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_meant(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_generation_defaults(written(tmp_path, content), "auto")
    assert caught.value.param == "generation_config"
    assert "generation_config.json" in caught.value.message


def test_overrides_replace_values_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = written(tmp_path, {"temperature": 0.7, "top_k": 50, "max_new_tokens": 9})
    overrides = {"temperature": 0.2, "max_new_tokens": None, "min_p": 0.1, "presence_penalty": 1.5}
    found = read_generation_defaults(source, "auto", overrides)
    assert found == {"temperature": 0.2, "top_k": 50, "min_p": 0.1}
    assert "override_generation_config: presence_penalty: ignored" in caplog.text, (
        "vLLM ignores it too"
    )
    assert read_generation_defaults("", "vllm", {"top_k": 5}) == {"top_k": 5}
    assert read_generation_defaults(source, "auto", {"do_sample": False})["temperature"] == 0.0
    for wrong in ({"temperature": -1}, {"top_k": "x"}, {"do_sample": 3}):
        with pytest.raises(ConfigError, match="override_generation_config") as caught:
            read_generation_defaults(source, "auto", wrong)
        assert caught.value.param == "override_generation_config"
