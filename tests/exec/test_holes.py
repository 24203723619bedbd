"""The KV cache is one array. It fits between the holes that loading leaves in a GPU's memory, whatever the card."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from flax import nnx

from orca_jax.assembly import resolve
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.executor import PlacedStage
from orca_jax.exec.cache import cache_shape, largest_stack, workspace_bytes
from orca_jax.model import transformer
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import abstract_decoder, tensor_mesh
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, EngineConfig, ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named
from tests.covering import covering
from tests.exec.best_fit import BestFit, OutOfMemory
from tests.project.source import ROOT

pytestmark = pytest.mark.usefixtures("optimised")  # memory is that of programs of users

LLAMA = read_model_config("preset:llama-3-8b")
QWEN = replace(
    LLAMA,
    layers=(LLAMA.layers * 2)[:48],
    embed_dim=5120,
    mlp_dim=13824,
    num_heads=40,
    attention_bias=True,
    vocab_size=152064,
    max_positions=32768,
)
MODELS = {"Llama-3-8B": LLAMA, "Qwen-14B": QWEN}
CARDS = {"H200": 151_397_597_184, "80 GB": 80 << 30, "40 GB": 40 << 30}
SHARE = 0.9  # of the card, for this process
TEMPORARY = (0, 1 << 30, 2 << 30)  # bytes of the program that draws the weights
# weights take 29.5 GB and a stack 6.8 GB of 38.7: no request fits beside both
TOO_SMALL = {("Qwen-14B", "40 GB")}


class Held:
    """An array of a device, freed with this object."""

    def __init__(self, memory: BestFit, leaf: jax.ShapeDtypeStruct) -> None:
        self.shape, self.dtype, self.sharding = leaf.shape, leaf.dtype, leaf.sharding
        self.memory, size = memory, math.prod(leaf.shape) * leaf.dtype.itemsize
        weakref.finalize(self, memory.free, memory.allocate(size))


@cache
def stacked_shapes(model: ModelConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    return abstract_decoder(model, "bfloat16", tensor_mesh(jax.devices()[:1]))


def shapes_of(model: ModelConfig) -> Decoder:
    decoder: Decoder = nnx.merge(*stacked_shapes(model))
    return decoder


@pytest.fixture(autouse=True)
def _collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect garbage as users do: memory is what is tested."""
    monkeypatch.setattr(transformer, "gc", gc)


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[BestFit, ModelConfig, int], Decoder]:
    """Random weights: stacks first, from one program with temporary memory, which are then unstacked by the engine."""
    layer_of = transformer._layer_of

    def held_layer(stack: Any, index: int) -> Any:
        shape: Any = layer_of(
            jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=stack.sharding), index
        )
        return Held(stack.memory, shape) if isinstance(stack, Held) else shape

    monkeypatch.setattr(transformer, "_layer_of", held_layer)

    def load(memory: BestFit, model: ModelConfig, temporary: int) -> Decoder:
        structure, state = stacked_shapes(model)
        in_use = memory.allocate(temporary)
        decoder: Decoder = nnx.merge(
            structure, jax.tree.map(lambda leaf: Held(memory, leaf), state)
        )
        memory.free(in_use)
        decoder.unstack()
        return decoder

    return load


def read_files(memory: BestFit, model: ModelConfig, temporary: int) -> Decoder:
    """Weights of files, each array as the engine keeps it."""
    decoder = shapes_of(model)
    decoder.unstack()
    structure, state = nnx.split(decoder)
    held: Decoder = nnx.merge(structure, jax.tree.map(lambda leaf: Held(memory, leaf), state))
    return held


def placed_on_gpu(model: ModelConfig, *, is_random: bool) -> Any:
    shapes = shapes_of(model)
    shapes.unstack()
    mesh = tensor_mesh(jax.devices()[:1])
    device, weights = (
        Mock(jax.Device, platform="gpu"),
        SimpleNamespace(is_random=is_random, dtype="bfloat16"),
    )
    stages = (PlacedStage(mesh, shapes),)
    return SimpleNamespace(
        platform=platform_named("gpu"), devices=[device], stages=stages, mesh=mesh, weights=weights
    )


def allocate_pages(
    memory: BestFit, model: ModelConfig, config: CacheConfig, workspace: int
) -> None:
    """The pages as one array, and then the memory of programs."""
    (pages,) = jax.tree.leaves(cache_shape(config))
    for size in (math.prod(pages.shape) * pages.dtype.itemsize, workspace):
        memory.allocate(size)


@pytest.mark.parametrize(
    ("name", "card", "source", "temporary"),
    covering([(*case, "files", 0) for case in product(MODELS, CARDS)], size=1)
    + covering(
        [(*case, "random", size) for *case, size in product(MODELS, CARDS, TEMPORARY)], size=1
    ),
)
def test_the_engine_allocates_its_pages(
    name: str,
    card: str,
    source: str,
    temporary: int,
    draw: Callable[[BestFit, ModelConfig, int], Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it would hide small holes
    monkeypatch.setattr("orca_jax.exec.cache._rounded", lambda number, bits: number)
    model, memory, settings = (
        MODELS[name],
        BestFit(int(CARDS[card] * SHARE)),
        choices_of(EngineConfig("model")),
    )
    placed = placed_on_gpu(model, is_random=source == "random")

    def size() -> CacheConfig:
        return resolve._cache(settings, model, 8192, placed, 2048, memory.free_bytes)

    if source == "random" and (name, card) in TOO_SMALL:
        with pytest.raises(ConfigError, match="GiB are free for the KV cache"):
            size()
        return
    config = size()
    weights = (draw if source == "random" else read_files)(memory, model, temporary)
    allocate_pages(
        memory, model, config, workspace_bytes(model, 2048, settings.requests.num_rows, 8192)
    )
    assert weights is not None, "held until here"


@pytest.mark.parametrize(
    ("name", "card", "temporary"), covering(product(MODELS, CARDS, TEMPORARY), size=1)
)
def test_the_check_of_a_device_allocates_its_pages(
    name: str,
    card: str,
    temporary: int,
    draw: Callable[[BestFit, ModelConfig, int], Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lab.device_check import steps
    from lab.device_check.part import Setting

    memory = BestFit(int(CARDS[card] * SHARE))
    model = steps.Model(Setting("gpu", dry_run=False), "preset:llama-3-8b")
    model.__dict__["config"] = MODELS[name]
    monkeypatch.setattr(
        steps, "free_memory", lambda devices, share, needed: memory.free_bytes - needed
    )
    weights = draw(memory, MODELS[name], temporary)
    for rows in steps.ROWS:
        num_pages, beside = model.pages_that_fit(rows, rows, 1084), BestFit(memory.largest)
        assert num_pages > 0
        groups = one_group(model.config.layer_caches)
        config = CacheConfig(groups, (num_pages,), steps.PAGE_SIZE, "bfloat16", "token_major")
        allocate_pages(
            beside, model.config, config, workspace_bytes(model.config, rows, rows, 1084)
        )
    assert weights is not None, "held until here"


def test_the_check_skips_a_model_whose_loading_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lab.device_check import steps
    from lab.device_check.part import Setting, Skip

    model = steps.Model(Setting("gpu", dry_run=False), "preset:llama-3-8b")
    # weights of 16.1 GB
    monkeypatch.setattr(steps, "bytes_of_device", lambda: int(18e9 / steps.UTILIZATION))
    monkeypatch.setattr(steps, "random_decoder", lambda config, **_: pytest.fail("it loads"))
    with pytest.raises(
        Skip, match=r"loading takes 18\.5 GiB of the device, and 16\.8 GiB are available"
    ):
        model.load()


def test_one_array_of_all_free_memory_does_not_fit(
    draw: Callable[[BestFit, ModelConfig, int], Decoder],
) -> None:
    """The model of the allocator shows the holes: the largest free chunk is smaller by the largest stack."""
    memory = BestFit(int(CARDS["H200"] * SHARE))
    weights = draw(memory, LLAMA, 0)
    assert memory.free_bytes - memory.largest > 1 << 30
    with pytest.raises(OutOfMemory):
        memory.allocate(memory.free_bytes)
    shapes = shapes_of(LLAMA)
    shapes.unstack()
    assert memory.free_bytes - memory.largest <= largest_stack(shapes) == 32 * 4096 * 14336 * 2
    assert weights is not None, "held until here"


def test_chunks_are_split_and_joined() -> None:
    memory = BestFit(4 << 30)
    first, second, third = (memory.allocate(1 << 30) for _ in range(3))
    memory.free(first)
    assert memory.allocate(512 << 20) is first, (
        "of two free chunks of a GiB the first; a split leaves a half"
    )
    memory.free(second)
    assert memory.largest == 3 << 29, "a half and a whole are joined"
    memory.free(third)
    assert memory.largest == 7 << 29 and memory.free_bytes == 7 << 29
