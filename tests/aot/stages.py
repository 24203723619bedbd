"""Compilation of pipeline stages for absent TPUs, with the programs of the executor."""

from dataclasses import dataclass

from flax import nnx
from jax.sharding import Mesh

from orca_jax.exec.compile import compile_one, compiler_options
from orca_jax.exec.programs import Programs
from orca_jax.model.load import abstract_decoder, tensor_mesh
from orca_jax.model.stages import spans
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig
from orca_jax.values.platforms import platform_named
from tests.aot.tpu import Compiled, bytes_of, devices_of, on_one_device, read

PAGE_SIZE = 128


@dataclass(frozen=True)
class Split:
    """A model on `stages * chips` chips.

    Attributes:
        topology: name of libtpu's topology, with all chips.
        preset: of the model.
        stages: of the pipeline.
        chips: of each stage.
    """

    topology: str
    preset: str
    stages: int
    chips: int

    def __str__(self) -> str:
        return f"{self.preset}, pp {self.stages} x tp {self.chips} on {self.topology}"


@dataclass(frozen=True)
class StageMemory:
    """The program of a stage, and the bytes of its arrays on each chip."""

    program: Compiled
    weights: int
    kv: int


def compile_stage(
    split: Split,
    index: int,
    model: ModelConfig,
    *,
    tokens: int,
    rows: int,
    max_model_len: int,
    num_pages: int,
) -> StageMemory:
    """Compile the layers of stage `index`."""
    cache = CacheConfig(
        one_group(model.layer_caches), (num_pages,), PAGE_SIZE, "bfloat16", "token_major"
    )
    config = ExecutorConfig(
        "bfloat16",
        split.chips,
        (tokens,),
        rows,
        max_model_len,
        cache,
        pipeline_parallel_size=split.stages,
    )
    mesh: Mesh = tensor_mesh(
        devices_of(split.topology)[index * split.chips : (index + 1) * split.chips]
    )
    span = spans(model, split.stages)[index]
    decoder: Decoder = nnx.merge(*abstract_decoder(model, "bfloat16", mesh, span))
    programs = Programs(decoder, config, mesh)
    state = programs._state()
    lowered = programs._lower_layers(tokens, state)
    compiled = compile_one(
        lowered, compiler_options(platform_named("tpu"), mesh.devices.flat[0].device_kind)
    )
    (pages,) = on_one_device(state.caches.pages)
    stacked = [weight for weight in programs.weights if len(weight.shape) == 3]
    return StageMemory(
        read(compiled, pages, stacked), bytes_of(on_one_device(programs.weights)), bytes_of(pages)
    )
