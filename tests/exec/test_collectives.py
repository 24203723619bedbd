"""The collectives of compiled programs, counted: two all-reduces a layer, and nothing as wide as the vocabulary."""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import jax
import pytest
from flax import nnx

from orca_jax.exec.programs import ProgramName, Programs
from orca_jax.model.load import abstract_decoder, tensor_mesh
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RopeConfig
from tests.exec.test_executor import MODEL

pytestmark = [
    pytest.mark.usefixtures("narrow_samplers", "quick_compiles"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts on fake devices"),
]
TOKENS, ROWS, WINDOW = 16, 4, 256
GPT2 = replace(MODEL, vocab_size=5000)
LLAMA = replace(
    GPT2,
    family="llama",
    num_kv_heads=2,
    norm="rmsnorm",
    activation="silu",
    gated_mlp=True,
    attention_bias=False,
    mlp_bias=False,
    tied_embeddings=False,
    layers=tuple(kind._replace(rope=RopeConfig(10000.0)) for kind in GPT2.layers),
    learned_positions=False,
)
EXPERTS = replace(LLAMA, experts=ExpertsConfig(4, 2, shared_dim=32))
EMBEDDING = GPT2.embed_dim
type Form = Literal["scanned", "unrolled", "switched"]
_COLLECTIVE = re.compile(
    r" = (?P<shapes>.+?) (?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


@dataclass(frozen=True)
class Collective:
    """One operation of a program, with the sizes of its arrays, and the names of the functions that hold it."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    place: str


def collectives(program: jax.stages.Compiled) -> list[Collective]:
    text = program.as_text()
    assert text is not None
    found = []
    for line in text.splitlines():
        if operation := _COLLECTIVE.search(line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", operation["shapes"])
            name = re.search(r'op_name="([^"]*)"', line)
            sizes = tuple(tuple(int(size) for size in shape.split(",") if size) for shape in shapes)
            found.append(Collective(operation["kind"], sizes, name[1] if name else ""))
    return found


def compiled(model: ModelConfig, devices: int, form: Form, name: ProgramName) -> list[Collective]:
    mesh = tensor_mesh(jax.devices()[:devices])
    decoder = nnx.merge(*abstract_decoder(model, "float32", mesh))
    if form != "scanned":
        decoder.unstack(switched=form == "switched")
    cache = CacheConfig(one_group(decoder.config.layer_caches), (100,), 8, "float32")
    config = ExecutorConfig(
        "float32", devices, (TOKENS,), ROWS, 64, cache, None, None, copies_blocks=True
    )
    programs = Programs(decoder, config, mesh)
    return collectives(programs.lowerings()[name]().compile())


@pytest.mark.parametrize(
    ("model", "devices", "form"),
    [
        pytest.param(GPT2, 2, "switched", marks=pytest.mark.slow),
        (GPT2, 4, "scanned"),
        pytest.param(LLAMA, 2, "unrolled", marks=pytest.mark.slow),
        (LLAMA, 4, "switched"),  # with two copies of each key/value head
        (EXPERTS, 2, "switched"),
        pytest.param(EXPERTS, 4, "scanned", marks=pytest.mark.slow),
    ],
)
def test_a_layer_has_two_all_reduces(model: ModelConfig, devices: int, form: Form) -> None:
    found = compiled(model, devices, form, ("layers", TOKENS))
    lookup = [each for each in found if each.place.endswith("/gather")]
    in_layers = [each for each in found if each not in lookup]
    assert [(each.kind, each.shapes) for each in lookup] == [("all-reduce", ((TOKENS, EMBEDDING),))]
    assert {each.kind for each in in_layers} == {"all-reduce"}
    assert all(each.shapes[0][1:] == (EMBEDDING,) for each in in_layers), (
        "the outputs of attention and MLP"
    )
    if form == "scanned":
        assert len(in_layers) == 2, "in the one body of the loop"
    else:
        assert len(in_layers) == 2 * model.num_layers
    if form == "switched":
        branches = {
            re.search(r"/while/body/.*/branch_(\d+)_fun/", each.place)[1] for each in in_layers
        }
        assert branches == set(map(str, range(model.num_layers))), (
            "two in each branch, and each pass runs one"
        )


@pytest.mark.parametrize("devices", [2, 4])
def test_a_copy_of_blocks_is_one_on_each_device(devices: int) -> None:
    """Each device copies its own heads, whatever the number of processes: nothing is sent."""
    assert compiled(LLAMA, devices, "switched", ("copy_blocks", 0)) == []


@pytest.mark.parametrize(
    ("name", "devices"), [pytest.param("plain", 2, marks=pytest.mark.slow), ("full", 4)]
)
def test_samplers_gather_no_logits(name: str, devices: int) -> None:
    """The largest arrays that shards exchange are the candidates of a window: 256 for each row and device."""
    width = 8
    found = compiled(LLAMA, devices, "switched", (name, width))
    assert {each.kind for each in found} == {"all-reduce", "all-gather"}
    largest = max(math.prod(shape) for each in found for shape in each.shapes)
    assert largest == width * devices * WINDOW < width * LLAMA.vocab_size
