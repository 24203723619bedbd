"""Configurations are read from presets, directories and the Hub, without JAX."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.values.errors import ConfigError
from tests.model.describe.options import GPT2, LLAMA
from tests.project.source import ROOT

# name: layers, embed, heads, KV heads, MLP, vocabulary, positions
PRESETS = {
    "gpt2-tiny": (2, 64, 2, 2, 256, 512, 1024),
    "distilgpt2": (6, 768, 12, 12, 3072, 50257, 1024),
    "gpt2": (12, 768, 12, 12, 3072, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 16, 4096, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 20, 5120, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 25, 6400, 50257, 1024),
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, 131072),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, 8192),
    "mixtral-8x7b": (32, 4096, 32, 8, 14336, 32000, 32768),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 768, 151936, 40960),
    "gpt3-13b": (40, 5120, 40, 40, 20480, 50257, 2048),
    "gpt3-101b": (80, 10240, 80, 80, 40960, 50257, 2048),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 50257, 2048),
    "gpt3-341b": (120, 15360, 120, 120, 61440, 50257, 2048),
}
HUB: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/fixtures/configs/hub.json").read_text(encoding="utf-8")
)


def test_presets() -> None:
    assert (
        json.loads((ROOT / "orca_jax/model/presets.json").read_text("utf-8")).keys()
        == PRESETS.keys()
    )
    for name, shape in PRESETS.items():
        c = read_model_config(f"preset:{name}")
        sizes = (
            c.num_layers,
            c.embed_dim,
            c.num_heads,
            c.num_kv_heads,
            c.mlp_dim,
            c.vocab_size,
            c.max_positions,
        )
        assert sizes == shape, name
        assert c.head_dim * c.num_heads == c.embed_dim or name == "qwen3-30b-a3b", name


def test_describing_a_model_imports_no_jax() -> None:
    code = (
        "import sys, orca_jax.model.describe as d; d.read_model_config('preset:gpt2');"
        "print([m for m in ('jax', 'flax', 'numpy', 'orbax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_key_there_is_no_end_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers: the default of the family joins neither the tokens of the other file nor an empty list."""
    for family in (GPT2, LLAMA):
        (tmp_path / "config.json").write_text(json.dumps({**family, "vocab_size": 97}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
        assert read_model_config(tmp_path).eos_token_ids == (7,)
        assert not caplog.records
        (tmp_path / "generation_config.json").write_text("{}")
        assert read_model_config(tmp_path).eos_token_ids == ()
        assert "no eos_token_id" in caplog.text
        caplog.clear()


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "eos_token_id": 7}))
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("name", HUB)
def test_configurations_of_the_hub_are_read(name: str) -> None:
    config = config_from_hf(HUB[name])
    assert config.vocab_size == HUB[name]["vocab_size"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"gpt2"'])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt5'.*gpt2-xl"):
        read_model_config("preset:gpt5")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"\\udc00": 1}', "surrogates not allowed"),
        ('{"a": ["x\\ud800"]}', "surrogates not allowed"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "it is nested deeper than 64 levels"),
        ("[" * 100_000, "it is nested deeper than 64 levels"),
    ],
    ids=["key", "value", "deep", "very deep"],
)
def test_texts_that_cannot_be_quoted_are_refused(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_model_config(tmp_path)
    assert caught.value.message.encode().startswith(str(tmp_path / name).encode())


def test_whole_pairs_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "description": "\U0001f600"}))
    read_model_config(tmp_path)
