"""The table `types.txt`: the defaults, classes and published models of each `model_type`.

A row has the sizes of transformers' configuration, in the order of `KEYS`, the number in norms, the base of rotary
positions, and whether the head is the embedding; then the classes of transformers, and published models. Without a
number the default is Llama's, or follows from others. A prefix of classes stands for the usual two, and one with a star
for classes of models for images and texts. A type with a parent is a variant of it with other defaults.
"""

from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
)
_TIED = "tied"


class ModelType(NamedTuple):
    """A row. `classes` of transformers begin with the usual one; `models` are published ones."""

    parent: str
    sizes: Mapping[str, int]
    norm_eps: float
    theta: float
    is_tied: bool
    classes: tuple[str, ...]
    models: str


def _row(line: str) -> tuple[str, ModelType]:
    facts, _, models = line.partition(": ")
    name, *numbers, norm_eps, theta, tied, classes = facts.split()
    kind, _, parent = name.partition("=")
    pairs = zip(KEYS, numbers, strict=True)
    sizes = {key: int(number) for key, number in pairs if number != "-"}
    return kind, ModelType(
        parent,
        sizes,
        _number(norm_eps, 1e-6),
        _number(theta, 10_000.0),
        tied == _TIED,
        _classes(classes),
        models,
    )


def _number(text: str, usual: float) -> float:
    return usual if text == "-" else float(text)


def _classes(text: str) -> tuple[str, ...]:
    """The names of classes."""
    if "," in text:
        return tuple(text.split(","))
    if text.endswith("*"):
        return (f"{text[:-1]}ForConditionalGeneration", f"{text[:-1]}Model")
    if text.endswith("Generation"):
        return (text,)
    return (f"{text}ForCausalLM", f"{text}Model")


def _table() -> str:
    folder = resources.files("orca_jax.model.families")
    return folder.joinpath("types.txt").read_text(encoding="utf-8")


TYPES: Mapping[str, ModelType] = dict(map(_row, _table().splitlines()))
"""By `model_type`, in their order."""
