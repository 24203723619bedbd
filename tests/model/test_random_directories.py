"""Random model directories: the results of transformers, or a refusal that names the key.

`random_directories.py` makes the directories. The record of transformers is a file of scripts/record_transformers.py.
"""

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.model.describe import read_model_config
from orca_jax.model.families import FAMILIES as SUPPORTED
from orca_jax.model.families.family import SHARED
from orca_jax.model.families.keys import FIXED, HARMLESS
from orca_jax.model.families.values import is_number, token_ids
from orca_jax.model.load import load_decoder
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.model.random_directories import FAMILIES, Directory, directory
from tests.model.random_settings import SIZES
from tests.model.reference import dense_attention, mesh_of
from tests.project.source import ROOT

RECORD = ROOT / "tests/fixtures/configs/transformers.json"
QUICK, ALL = 10, 200  # of each family
pytestmark = pytest.mark.usefixtures("quick_compiles")  # each operation is a program of its own
IGNORED = {key for keys in HARMLESS.values() for key in keys}


@cache
def record() -> Mapping[tuple[str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()[1:]]
    return {(line["family"], line["number"]): line for line in lines}


def lenient(made: Directory) -> str | None:
    """The reason for which a directory may be accepted here and refused by transformers."""
    for key, (kind, value) in made.strange.items():
        if key in IGNORED:
            return "the key has no effect, so its value is not read"
        if value is None and kind != "missing":
            return "null counts as missing"
        if kind == "missing" and key == "factor":
            return "yarn and longrope derive a missing factor"
        if key.endswith(("eps", "epsilon")) and is_number(value):
            return "an integer is a number"
    return None


def logits(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """Logits of every position, an operation at a time: each model has constants of its own, and would be compiled."""
    with jax.disable_jit():
        attend = dense_attention(decoder.config)
        hidden, _ = decoder(
            jnp.asarray(ids, jnp.int32), jnp.arange(len(ids), dtype=jnp.int32), attend, 0
        )
        return np.asarray(decoder.unembed(hidden))[:, : decoder.config.vocab_size]


def check_refusal(
    error: ConfigError | CheckpointError, made: Directory, theirs: Mapping[str, Any]
) -> None:
    """A refusal has a strange setting as its cause, and names it, or the tensors that do not fit."""
    assert made.strange, f"{error}: transformers has {theirs}"
    is_named = any(key[:40] in str(error) for key in made.strange)
    sizes = {
        *SIZES[made.family],
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "n_layer",
        "num_hidden_layers",
        "model_type",  # the keys of another type are unknown
    }
    assert is_named or sizes & made.strange.keys(), f"{made.strange}: {error}"


def check_result(
    config: ModelConfig, decoder: Decoder, made: Directory, theirs: Mapping[str, Any]
) -> None:
    if "refused" in theirs:
        assert lenient(made), f"accepted: {made.strange}; transformers: {theirs['refused']}"
        return
    assert "missing" not in theirs, f"weights are missing: {made.strange}"
    named = token_ids(made.config.get("eos_token_id"))  # those of generation_config.json join them
    assert config.eos_token_ids == tuple(dict.fromkeys((*named, *theirs["ends"])))
    prompt = made.prompt(theirs["prompt"])
    found = logits(decoder, prompt + theirs["ids"])[len(prompt) - 1 : -1]
    last = found[-1]
    ours = [last[0], last[-1], last.max(), np.abs(last).mean()]
    np.testing.assert_allclose(
        ours, theirs["logits"], rtol=0, atol=2e-4 * max(map(abs, theirs["logits"]))
    )
    if "margin" not in theirs:
        assert found.argmax(axis=1).tolist() == theirs["ids"]


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, marks=() if number < QUICK else pytest.mark.slow)
        for family in FAMILIES
        for number in range(ALL)
    ],
)
def test_the_result_is_that_of_transformers(tmp_path: Path, family: str, number: int) -> None:
    made, theirs = directory(family, number), record()[family, number]
    assert made.digest == theirs["digest"], "the record is old: run scripts/record_transformers.py"
    made.write(tmp_path)
    try:
        config = read_model_config(tmp_path)
        decoder = load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1), config=config)
    except (ConfigError, CheckpointError) as error:
        check_refusal(error, made, theirs)
    else:
        check_result(config, decoder, made, theirs)


def test_every_key_has_settings() -> None:
    made = [directory(family, number) for family in FAMILIES for number in range(ALL)]
    known = {*SHARED, *FIXED, *IGNORED}
    for family in map(SUPPORTED.__getitem__, FAMILIES):
        known |= family.keys | family.fixed.keys() | family.aliases.keys()
    known -= {"is_matryoshka", "matryoshka_dimensions"}  # of embedding models, in tests/embeddings
    known -= {"_pad_token_id"}  # of SmolVLM, in tests/model/states
    assert not known - {key for each in made for key in each.config}
    kinds = Counter(kind for each in made for kind, _ in each.strange.values())
    assert min(kinds[kind] for kind in ("odd", "wrong", "unknown")) > 40
    assert sum(not each.strange for each in made) > 50
