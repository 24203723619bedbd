"""Models with eight query heads and random weights, in Orbax's format, and their greedy tokens without an engine."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.describe import config_from_hf
from orca_jax.model.load import abstract_decoder, load_decoder
from orca_jax.model.parameters import flat_parameters, stored_shape
from tests.model.orbax import nested, save
from tests.model.reference import logits, mesh_of

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-8-heads": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 8,
        "n_positions": 64,
        "vocab_size": 300,
    },
    "llama-8-heads-2-groups": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "vocab_size": 300,
    },
}


def make_model(name: str, directory: Path) -> Path:
    """A directory of one of these models."""
    return write_model(CONFIGS[name], directory)


def write_model(hf: Mapping[str, Any], directory: Path) -> Path:
    """A directory of a model with this config.json; its weights are as wide as those of the reference models."""
    config = config_from_hf(dict(hf))
    _, shapes = abstract_decoder(config, "float32", mesh_of(1))
    draw = np.random.default_rng(0)
    flat = {}
    for path, leaf in flat_parameters(shapes).items():
        values = 0.2 * draw.standard_normal(stored_shape(path, leaf.shape, config))
        flat[path] = (values + path.endswith(".scale")).astype(np.float32)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf))
    save(directory / PARAMS, nested(flat))
    return directory


def greedy_tokens(directory: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The most probable next tokens, one after the other, by attention over the whole context."""
    decoder = load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    answers: list[list[int]] = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(logits(decoder, np.array(ids))[-1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers
