"""The lines that name a family's tensors, and the rows of weights that follow from them."""

import pytest

from orca_jax.model.describe import config_from_hf
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import JoinedPart, Weight
from orca_jax.model.families.names import TensorName, names


def rows(kind: str, **options: object) -> dict[str, Weight]:
    """The rows of a small model by the paths of parameters."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_from_hf({"model_type": kind, **sizes, **options})
    return {row.path: row for row in FAMILIES[kind].weights(config)}


def test_choices_are_taken_one_by_one() -> None:
    assert names("""
        attn.{q,k}      attention.{query,key}   pairs
        mlp.both        mlp.{gate,up}           by=columns
        {layer}         blocks
    """) == {
        "attention.query": TensorName(("attn.q",), pairs=True),
        "attention.key": TensorName(("attn.k",), pairs=True),
        "mlp.gate": TensorName(("mlp.both",), by="columns"),
        "mlp.up": TensorName(("mlp.both",), by="columns"),
        "blocks": TensorName(("{layer}",)),
    }


def test_a_later_line_replaces_an_earlier_one() -> None:
    assert names("one head \n two head") == {"head": TensorName(("two",))}
    assert names("one head \n two head or") == {"head": TensorName(("one", "two"))}


@pytest.mark.parametrize(
    "text", ["one", "{a,b} {c,d,e}", "one head unknown", "two head or", "one head skips=x"]
)
def test_a_line_without_a_meaning_is_an_error(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        names(text)


def test_parameters_of_one_tensor_have_columns_side_by_side() -> None:
    found = rows("phi3", hidden_size=32, intermediate_size=24)
    key = "layers.{layer}.self_attn.qkv_proj.weight"
    for index, name in enumerate(("query", "key", "value")):
        row = found[f"blocks.attention.{name}.kernel"]
        assert (row.key, row.part) == (key, JoinedPart(index, (32, 16, 16)))
    assert found["blocks.mlp.up.kernel"].part == JoinedPart(1, (24, 24))
    assert found["blocks.mlp.down.kernel"].part is None


def test_parameters_follow_from_the_configuration() -> None:
    assert "head.table" in rows("llama")
    assert "head.table" not in rows("llama", tie_word_embeddings=True)
    biases = {path for path in rows("llama", attention_bias=True) if path.endswith("bias")}
    assert biases == {f"blocks.attention.{name}.bias" for name in ("query", "key", "value", "out")}
    assert not any(path.endswith("bias") for path in rows("llama"))
