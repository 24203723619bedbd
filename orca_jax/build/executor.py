"""An executor from resolved settings. It has no "auto": each process of a cluster builds its part in the same way."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from orca_jax.config import DType, ExecutorConfig, LoadFormat, ModelConfig
from orca_jax.exec.ahead import CompiledAhead
from orca_jax.exec.compile import compile_cache
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.programs import Programs
from orca_jax.model.load import Loading, prepare_load, tensor_mesh
from orca_jax.model.transformer import Decoder
from orca_jax.progress import progress_bar
from orca_jax.startup import StartTimes


@dataclass(frozen=True)
class PlacedModel:
    """A model and its devices, before anything is read or compiled.

    Attributes:
        weights: found, and not read.
        mesh: of the devices.
        shapes: the decoder with a sharded shape in place of each parameter.
    """

    weights: Loading
    mesh: Mesh
    shapes: Decoder

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of the mesh in its order."""
        devices: list[jax.Device] = self.mesh.devices.flatten().tolist()
        return devices

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        platform: str = self.devices[0].platform
        return platform


def place_model(
    source: str, model: ModelConfig, *, dtype: DType, load_format: LoadFormat, seed: int, devices: list[jax.Device]
) -> PlacedModel:
    """Find the weights of a model, and split their shapes over devices. The arguments are those of `load_decoder`.

    Raises:
        ConfigError: the source or the format is wrong, or the model cannot be split evenly.
        CheckpointError: the files cannot be found or opened.
    """
    mesh = tensor_mesh(devices)
    weights = prepare_load(source, dtype=dtype, load_format=load_format, seed=seed, config=model)
    return PlacedModel(weights, mesh, _unstacked(weights.shapes(mesh), devices[0].platform))


def start_executor(
    placed: PlacedModel,
    config: ExecutorConfig,
    times: StartTimes,
    on_compile: Callable[[], None] | None = None,
    before_run: Callable[[], None] | None = None,
    *,
    has_bars: bool = False,
) -> JaxExecutor:
    """Load the weights, and compile the programs meanwhile.

    Args:
        placed: the model.
        config: the shapes.
        times: takes the phases of the start.
        on_compile: called between loading and compiling.
        before_run: called before the first program is run, when all are compiled.
        has_bars: draw progress bars.

    Raises:
        CheckpointError: the weights do not fit the configuration.
    """
    weights, mesh = placed.weights, placed.mesh
    with (
        compile_cache(config.compile_cache),
        CompiledAhead(Programs(placed.shapes, weights.config, config, mesh), times) as ahead,
    ):
        with times.phase("load"):
            decoder = _unstacked(weights.load(mesh, progress_bar("Loading", has_bars)), placed.platform)
        if on_compile is not None:
            on_compile()
        compiling = progress_bar("Compiling", has_bars)
        return JaxExecutor(
            decoder, weights.config, config, mesh, compiling, ahead=ahead, times=times, before_run=before_run
        )


def _unstacked(decoder: Decoder, platform: str) -> Decoder:
    """The same decoder in the form that suits the platform."""
    if platform != "tpu":  # on CPUs and GPUs a scan over layers would copy the weights of every layer
        decoder.unstack(switched=platform == "cpu")
    return decoder
