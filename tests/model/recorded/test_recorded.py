"""Small models of many families: log probabilities and greedy ids are those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.model.describe import read_model_config
from orca_jax.model.families.base import JoinedPart
from orca_jax.model.load import load_decoder
from orca_jax.model.parameters import path_of
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import GateClamp, LayerKind, RopeConfig
from tests.covering import slow
from tests.model.recorded.configs.mixtures import MIXTURES
from tests.model.recorded.record import PLACES, PROMPT, Recorded, load, names
from tests.model.reference import dense_attention, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # each operation is a program of its own
MUTATED = 1e-2
COMPILED = MIXTURES.keys() | {"aria", "glm4v_moe"}  # experts run in a loop
# their texts run
ALIKE = {"aya_vision", "deepseek_vl", "exaone4_5", "glm46v", "ovis2", "video_llama_3"}
CLOSE = 2e-5  # of the largest log probability

recorded = cache(load)


def logprobs(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Log probabilities after every token, an operation at a time: a program for each model would cost more."""
    with jax.disable_jit(decoder.config.experts is None):  # experts have a loop
        attend = dense_attention(decoder.config)
        hidden, _ = decoder(
            jnp.asarray(ids, jnp.int32), jnp.arange(len(ids), dtype=jnp.int32), attend, 0
        )
        logits = np.asarray(decoder.unembed(hidden), np.float64)[:, : decoder.config.vocab_size]
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def decoder_of(model: Recorded, folder: Path, **changes: Any) -> Decoder:
    """The decoder of a directory, with some fields of its configuration changed."""
    model.write(folder)
    config = replace(read_model_config(folder), **changes)
    decoder = load_decoder(folder, dtype="float32", mesh=mesh_of(1), config=config)
    decoder.unstack()
    return decoder


def difference(model: Recorded, decoder: Decoder) -> float:
    """The largest difference from the record."""
    return float(np.abs(logprobs(decoder, model.ids)[list(PLACES)] - model.logprobs).max())


def marks_of(family: str, number: int) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a configuration: from the second one of a family on they are records."""
    if number:
        return pytest.mark.slow, pytest.mark.record
    return (pytest.mark.slow,) if family in COMPILED | ALIKE else ()


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, marks=marks_of(family, number))
        for family in names()
        for number in range(len(recorded(family)))
    ],
)
def test_log_probabilities_equal_transformers(family: str, number: int, tmp_path: Path) -> None:
    model = recorded(family)[number]
    found = logprobs(decoder_of(model, tmp_path), model.ids)
    theirs = model.logprobs
    assert np.abs(found[list(PLACES)] - theirs).max() <= CLOSE * max(1.0, np.abs(theirs).max())
    assert found[PROMPT - 1 : -1].argmax(axis=1).tolist() == model.ids[PROMPT:].tolist()


def one_rope(config: ModelConfig, layer: LayerKind) -> LayerKind:
    """The layer with the rotary positions of layers without a window."""
    return layer._replace(rope=config.rope)


def one_window(config: ModelConfig, layer: LayerKind) -> LayerKind:
    """The layer with the longest window."""
    return layer._replace(window=max(kind.window or 0 for kind in config.layers))


LAYERS: dict[str, Callable[[ModelConfig, LayerKind], LayerKind]] = {
    "one rope": one_rope,
    "all windows": one_window,
    "no rope": lambda config, layer: layer._replace(rope=None),
    "a rope": lambda config, layer: layer._replace(rope=RopeConfig()),
    "no window": lambda config, layer: layer._replace(window=None),
}
"""Changes of layers."""


def changes_of(value: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes of a value's fields. Those of a field with fields of its own are a table of them."""
    found = {}
    for name, change in changes.items():
        if name == "layers":
            found[name] = tuple(LAYERS[change](value, layer) for layer in value.layers)
        elif name == "rope":
            ropes = [layer.rope and replace(layer.rope, **change) for layer in value.layers]
            pairs = zip(value.layers, ropes, strict=True)
            found["layers"] = tuple(layer._replace(rope=rope) for layer, rope in pairs)
        elif isinstance(change, dict):
            part = getattr(value, name)
            found[name] = replace(part, **changes_of(part, change))
        else:
            found[name] = change
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"logit_scale": 1.0}),
        ("smollm3", {"layers": "one rope"}),
        ("cohere2", {"layers": "one rope"}),
        ("arcee", {"activation": "relu"}),
        ("ministral3", {"rope": {"temperature": 0.0}}),
        ("hunyuan_v1_dense", {"qk_norm_last": False}),
        ("cohere2_vision", {"logit_scale": 0.0625}),
        slow("flint", {"layers": "one rope"}),
        slow("flint", {"experts": {"router": {"scores": "softmax"}}}),
        slow("flint", {"layers": "no window"}),
        slow("flint", {"layers": "all windows"}),
        slow("mellum", {"layers": "one rope"}),
        slow("llama4_text", {"rope": {"unit_eps": 0.0}}),
        slow("llama4_text", {"layers": "one rope"}),
        slow("llama4_text", {"experts": {"weighs_inputs": False}}),
        ("olmo", {"attention_clip": None}),
        ("nanochat", {"embedding_norm": False}),
        ("nanochat", {"rope": {"is_reversed": False}}),
        ("gemma4_text", {"value_norm": False}),
        ("gemma4_text", {"rope": {"share": 1.0}}),
        slow("gemma4_text", {"embedding_scale": 1.0}),
        slow("laguna", {"attention_gate_activation": "sigmoid"}),
        slow("laguna", {"experts": {"router": {"soft_cap": None}}}),
        slow("laguna", {"layers": "one rope"}),
        slow("cohere", {"residual": "pre_norm"}),
        slow("glm4", {"rope": {"rotated_dim": None}}),
        slow("granite", {"embedding_scale": 1.0}),
        slow("granite", {"attention_scale": None}),
        slow("gpt_oss", {"experts": {"clamp": GateClamp(1e9, 1.3)}}),
        slow("gpt_oss", {"experts": {"clamp": None}}),
        slow("phimoe", {"experts": {"router": {"reach": 1e9}}}),
        slow("phimoe", {"experts": {"router": {"scores": "softmax"}}}),
        slow("ernie4_5_moe", {"experts": {"router": {"least_sum": 0.0}}}),
        slow("glm4_moe", {"experts": {"router": {"scale": 1.0}}}),
        slow("glm4_moe", {"experts": {"router": {"scores": "softmax"}}}),
        slow("glm4_moe", {"experts": {"router": {"used_groups": 4}}}),
    ],
    ids=str,
)
def test_without_a_part_the_results_differ(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = recorded(family)[0]
    model.write(tmp_path)
    changed = changes_of(read_model_config(tmp_path), changes)
    assert difference(model, decoder_of(model, tmp_path, **changed)) > MUTATED


def test_without_another_order_of_columns_the_results_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JoinedPart, "column", lambda self, number: number)
    model = recorded("ernie4_5")[0]
    assert difference(model, decoder_of(model, tmp_path)) > MUTATED


@pytest.mark.slow
def test_with_the_keys_of_another_layer_the_results_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = recorded("gemma4_text")[4]
    decoder = decoder_of(model, tmp_path)
    assert [decoder.config.layer_of_pages(layer) for layer in range(6)] == [0, 1, 2, 3, 2, 3]
    monkeypatch.setattr(ModelConfig, "layer_of_pages", lambda self, layer: layer % 2)
    assert difference(model, decoder) > MUTATED


@pytest.mark.parametrize(
    ("family", "name", "neutral"),
    [
        ("phi", "head.bias", 0.0),
        ("apertus", "mlp.xielu.positive", -9.0),
        ("apertus", "mlp.xielu.slope", 0.0),
        ("gemma4_text", "layer_scale", 1.0),
        ("gemma4_text", "layer_input.norm.scale", 0.0),
        ("gemma4_text", "layer_inputs.table.table", 0.0),
        *(slow(family, "attention.sinks", -1e9) for family in ("gpt_oss", "granite_swa", "flint")),
        *(
            slow(family, name, 0.0)
            for family in ("glm4_moe", "ernie4_5_moe")
            for name in ("mlp.choice_bias", "mlp.shared.mlp.down.kernel")
        ),
        slow("llama4_text", "mlp.shared.mlp.down.kernel", 0.0),
        slow("gpt_oss", "mlp.router_bias", 0.0),
        slow("gpt_oss", "mlp.biases.down", 0.0),
    ],
)
def test_without_a_parameter_the_results_differ(
    family: str, name: str, neutral: float, tmp_path: Path
) -> None:
    model = recorded(family)[0]
    decoder = decoder_of(model, tmp_path)
    found = [
        (path, each)
        for path, each in nnx.to_flat_state(nnx.state(decoder))
        if path_of(path).endswith(name)
    ]
    neutrals = [
        (path, each.replace(jnp.full_like(each.get_value(), neutral))) for path, each in found
    ]
    assert neutrals
    nnx.update(decoder, nnx.from_flat_state(neutrals))
    assert difference(model, decoder) > MUTATED
