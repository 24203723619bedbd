"""An executor from resolved settings. It has no "auto": each process of a cluster builds its part in the same way."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from orca_jax.exec.ahead import CompiledAhead
from orca_jax.exec.compile import compile_cache
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.host import trim_heap
from orca_jax.exec.host_memory import use_large_pages
from orca_jax.exec.programs import Programs
from orca_jax.exec.stage import StageModel
from orca_jax.helpers.console import progress_bar
from orca_jax.kernels.native import Library
from orca_jax.model.load import KeepBits, Loading, prepare_load, tensor_mesh
from orca_jax.model.sharding import keep_order
from orca_jax.model.stages import spans
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, ExecutorConfig, LoadFormat, ModelConfig
from orca_jax.values.platforms import Platform, platform_of
from orca_jax.values.startup import StartTimes


class PlacedStage(NamedTuple):
    """A pipeline stage and its devices."""

    mesh: Mesh
    shapes: Decoder  # with a sharded shape in place of each parameter

    @property
    def is_local(self) -> bool:
        """True if this process has some of the devices."""
        devices: list[jax.Device] = self.mesh.devices.flatten().tolist()
        return any(device.process_index == device.client.process_index() for device in devices)


@dataclass(frozen=True)
class PlacedModel:
    """A model and its devices, before anything is read or compiled.

    Attributes:
        weights: found, and not read.
        stages: all layers, in their order.
        library: the library of products with packed matrices; None: the matrices are plain.
    """

    weights: Loading
    stages: tuple[PlacedStage, ...]
    library: Library | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices of the first stage. Other stages have as many, of the same kind."""
        return self.stages[0].mesh

    @property
    def config(self) -> ModelConfig:
        """The model's configuration after sharding. Heads of keys and values are repeated if the devices are more."""
        config: ModelConfig = self.stages[0].shapes.config
        return config

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of all stages, in their order."""
        return [*chain.from_iterable(stage.mesh.devices.flat for stage in self.stages)]

    @property
    def platform(self) -> Platform:
        """The platform of the devices."""
        return platform_of(self.devices[0])

    @property
    def skips_padding(self) -> bool:
        """True if padding of launches is not multiplied."""
        return all(stage.shapes.is_packed for stage in self.stages)

    @property
    def products(self) -> str:
        """The products of matrices on a CPU, "native", "native in 8 bits" or "xla"; empty on other devices."""
        if not self.platform.is_host:
            return ""
        own = "native in 8 bits" if self.library and self.library.activation_bits == 8 else "native"
        return "xla" if self.library is None else own


def place_model(
    source: str,
    model: ModelConfig,
    *,
    dtype: DType,
    load_format: LoadFormat,
    seed: int,
    devices: list[jax.Device],
    num_stages: int = 1,
    library: Library | None = None,
) -> PlacedModel:
    """Find the weights of a model, and split their shapes over devices.

    Args:
        source: see `load_decoder`, as for the next four.
        model: its configuration.
        dtype: the type of the parameters.
        load_format: the format of the weights.
        seed: the seed of random weights.
        devices: those of the first stage first; each stage has as many.
        num_stages: pipeline stages.
        library: the library of products with packed matrices, on CPUs; None: the matrices stay plain.

    Raises:
        ConfigError: the source or the format is wrong, or the model cannot be split evenly.
        CheckpointError: the files cannot be found or opened.
    """
    weights = prepare_load(source, dtype=dtype, load_format=load_format, seed=seed, config=model)
    size = len(devices) // num_stages
    stages = []
    for index, span in enumerate(spans(weights.config, num_stages)):
        mesh = tensor_mesh(devices[index * size : (index + 1) * size])
        shapes = weights.shapes(mesh, span)
        arrange_and_pack(weights.keep_bits, devices, library, shapes)
        stages.append(PlacedStage(mesh, shapes))
    return PlacedModel(weights, tuple(stages), library)


def start_executor(
    placed: PlacedModel,
    config: ExecutorConfig,
    times: StartTimes,
    on_compile: Callable[[], None] | None = None,
    before_run: Callable[[], None] = lambda: None,
    *,
    has_bars: bool = False,
    is_enough: Callable[[int, float], bool] = lambda size, seconds: False,
) -> JaxExecutor:
    """Load the weights, and compile the programs meanwhile.

    Args:
        placed: the model.
        config: the shapes.
        times: takes the phases of the start.
        on_compile: called between loading and compiling.
        before_run: called before the first program is run, when all are compiled.
        has_bars: draw progress bars.
        is_enough: see `JaxExecutor`.

    Raises:
        CheckpointError: the weights do not fit the configuration.
    """
    own = [stage for stage in placed.stages if stage.is_local]
    first = next((size for size in config.buckets if is_enough(size, math.inf)), None)
    programs = [Programs(shapes, config, mesh, largest=first) for mesh, shapes in own]
    with compile_cache(config.compile_cache), CompiledAhead(programs, times) as ahead:
        with times.phase("load"):
            stages = [_load(placed, stage, has_bars) for stage in placed.stages]
        if on_compile is not None:
            on_compile()
        compiling = progress_bar("Compiling", has_bars)
        executor = JaxExecutor(
            stages,
            placed.config,
            config,
            compiling,
            ahead=ahead,
            times=times,
            before_run=before_run,
            is_enough=is_enough,
        )
    trim_heap()
    return executor


def _load(placed: PlacedModel, stage: PlacedStage, has_bars: bool) -> StageModel:
    """Read the weights of a stage, unless it belongs to other processes."""
    if not stage.is_local:
        return StageModel(None, stage.mesh)
    span = stage.shapes.span
    name = "Loading"
    if not span.is_whole:
        name = f"Loading layers {span.start} to {span.stop - 1}"
    keep = placed.weights.keep_bits
    devices = placed.devices
    library = placed.library
    # Quantised weights are read in the form of the plain ones, so both have to be unstacked, or neither.
    reads_stacks = stage.shapes.is_stacked or keep is not None
    if placed.weights.packs:
        form = partial(arrange_and_pack, keep, devices, library)
    else:
        form = partial(arrange_for, keep, devices, library if reads_stacks else None)
    decoder = placed.weights.load(stage.mesh, progress_bar(name, has_bars), span, form)
    if library is not None:
        if not placed.weights.packs:
            decoder.pack(library, len(devices))
        use_large_pages(jax.tree.leaves(nnx.state(decoder)))
    return StageModel(decoder, stage.mesh)


def arrange_and_pack(
    keep_bits: KeepBits | None, devices: list[jax.Device], library: Library | None, decoder: Decoder
) -> None:
    """`arrange_for`, and then the packed form of the matrices if there is a library."""
    arrange_for(keep_bits, devices, library, decoder)
    if library is not None:
        decoder.pack(library, len(devices))


def arrange_for(
    keep_bits: KeepBits | None, devices: list[jax.Device], library: Library | None, decoder: Decoder
) -> None:
    """`arrange`, with the bits of the files where the library or XLA multiplies them."""
    platform = platform_of(devices[0])
    if library is None or keep_bits is None:
        if keep_bits is not None:
            keep_bits(decoder, None, len(devices))
        arrange(platform, decoder, library)
        return
    plain: Decoder = nnx.clone(decoder)
    keep_bits(decoder, library, len(devices))
    if not decoder.can_pack(library):
        decoder.blocks = plain.blocks
        arrange(platform, decoder)
        keep_bits(decoder, library, len(devices))


def arrange(platform: Platform, decoder: Decoder, library: Library | None = None) -> None:
    """Change the layers of a decoder to the form that suits the platform. With a library `Decoder.pack` comes next."""
    # On CPUs and GPUs a scan over layers copies the weights of every layer, on TPUs only those of experts. The library
    # reads packed matrices in their stack.
    # Layers with pages of several shapes, or with those of another layer, have no common body.
    shapes = {cache.shape for cache in decoder.config.layer_caches if cache is not None}
    is_uniform = len(shapes) <= 1 and not decoder.config.shares_keys
    is_read_in_place = (
        platform.scans_in_place and decoder.config.experts is None and is_uniform
    ) or (library is not None and decoder.can_pack(library))
    if not is_read_in_place:
        decoder.unstack(switched=platform.switches_layers and is_uniform)
    if platform.has_tiles:
        keep_order(decoder)
