"""Programs of executors that tests share, so that equal ones are compiled once, and compiled when they are used."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh

from orca_jax.exec.compile import CompileCounter, Options, compile_one
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.expected import LaunchTimes
from orca_jax.exec.programs import ProgramName, Programs
from orca_jax.model import load
from orca_jax.model.stages import LayerSpan
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, ModelConfig

type Lower = Callable[..., jax.stages.Lowered]
type Key = Callable[..., Hashable]


def _shapes(*trees: Any) -> Hashable:
    return tuple((x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(trees))


def _common(self: Programs) -> Hashable:
    devices = tuple(device.id for device in self._mesh.devices.flat)
    config, is_quick = self._config, jax.config.read("jax_disable_most_optimizations")
    return devices, is_quick, config.num_rows, config.has_library, self.widths[-1]


def _layers_key(self: Programs, bucket: int, state: Any) -> Hashable:
    config = replace(
        self._config, buckets=(bucket,), compile_cache=None, strict_compile=False, num_drafts=0
    )
    return (
        "layers",
        _common(self),
        config,
        self._model,
        self.span,
        _shapes(self.weights, state.caches, state.history),
    )


def _adapted_key(self: Programs, bucket: int, state: Any) -> Hashable:
    return "adapted", _layers_key(self, bucket, state)


def _sampler_key(self: Programs, name: str, width: int, state: Any) -> Hashable:
    shapes = _shapes(self.unembedding, state.history, state.last_token)
    model = self._model.family, self._model.vocab_size
    return name, width, _common(self), self._config.logprobs_mode, model, shapes


class _Remembered(jax.stages.Lowered):
    """A lowered program with the one method that compilation needs. An equal program is not compiled again."""

    __slots__ = ("_key", "_lowered", "_program")

    def __init__(self, key: Hashable, lower: Lower) -> None:
        self._key = key
        self._program = _compiled.get(key)
        self._lowered = lower() if self._program is None else None

    def compile(
        self, compiler_options: Mapping[str, Any] | None = None, **_: object
    ) -> jax.stages.Compiled:
        if self._lowered is not None and self._program is None:
            self._program = _compiled[self._key] = compile_one(
                self._lowered, compiler_options or {}
            )
            if len(_compiled) > MOST_COMPILED:
                del _compiled[next(iter(_compiled))]
        assert self._program is not None, "it was compiled before"
        return self._program

    def cost_analysis(self) -> Any:
        """The analysis of the lowered program, before it is compiled."""
        assert self._lowered is not None, "an equal program was compiled, and none lowered"
        return self._lowered.cost_analysis()


_compiled: dict[Hashable, jax.stages.Compiled] = {}  # of this process, the oldest first

MOST_COMPILED = 200
"""A program takes 200 to 250 memory maps on a CPU, and Linux allows 65,530 for a process. XLA aborts at the limit."""


def forget_programs() -> None:
    """Forget the programs of this process; those of living executors stay."""
    _compiled.clear()


def remembering() -> dict[str, Lower]:
    """The methods of `Programs` that lower a program, by name, without work for programs compiled before."""
    keys: dict[str, Key] = {
        "_lower_layers": _layers_key,
        "_lower_adapted": _adapted_key,
        "_lower_sampler": _sampler_key,
    }
    return {name: _remember(getattr(Programs, name), key) for name, key in keys.items()}


def _remember(lower: Lower, key: Key) -> Lower:
    def lower_once(programs: Programs, *args: Any) -> jax.stages.Lowered:
        return _Remembered(key(programs, *args), lambda: lower(programs, *args))

    return lower_once


_here = threading.local()


class _Late:
    """A program that is traced and compiled at its first call."""

    def __init__(self, lower: Callable[[], jax.stages.Lowered], options: Options) -> None:
        self._lower, self._options = lower, options
        self._program: jax.stages.Compiled | None = None

    def __call__(self, *args: Any) -> Any:
        if self._program is None:
            _here.is_late = True
            self._program = compile_one(self._lower(), self._options)
            _here.is_late = False
        return self._program(*args)


@contextmanager
def compiled_late() -> Iterator[None]:
    """Trace and compile the programs of executors at their first launch, and measure nothing at start."""
    counts = CompileCounter._counts_here  # of everything else
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "compile", _late_programs)
        patch.setattr(JaxExecutor, "_warm_up", _measure_nothing)
        patch.setattr(
            CompileCounter,
            "_counts_here",
            lambda own: counts(own) and not getattr(_here, "is_late", False),
        )
        yield


def narrow_samplers(patch: pytest.MonkeyPatch) -> None:
    """Compile no samplers wider than the few rows of a test. A prompt is scored in more launches then."""
    patch.setattr("orca_jax.exec.buckets._MIN_LARGEST_WIDTH", 8)


MOST_DRAWN = 16 << 20
"""Bytes of the largest weights that a process keeps for later decoders."""


@contextmanager
def drawn_once() -> Iterator[None]:
    """Draw the weights of equal small models once. No engine writes into them."""
    draw = load.random_decoder
    drawn: dict[Hashable, tuple[Any, Any]] = {}

    def again(
        config: ModelConfig,
        *,
        dtype: DType,
        mesh: Mesh,
        seed: int = 0,
        span: LayerSpan | None = None,
    ) -> Decoder:
        key = config, dtype, mesh, seed, span
        if key in drawn:
            merged: Decoder = nnx.merge(*drawn[key])
            return merged
        decoder = draw(config, dtype=dtype, mesh=mesh, seed=seed, span=span)
        structure, values = nnx.split(decoder)
        size = sum(value.nbytes for value in jax.tree.leaves(values))
        if config.decoder is None and size <= MOST_DRAWN:  # the code of own decoders may change
            drawn[key] = structure, values
        return decoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "random_decoder", again)
        yield


@contextmanager
def few_sizes() -> Iterator[None]:
    """Compile fewer programs: narrow samplers, and few buckets. A small batch gets more padding then."""
    with pytest.MonkeyPatch.context() as patch:
        narrow_samplers(patch)
        for sizes in ("_FINE", "_COARSE"):
            patch.setattr(f"orca_jax.exec.buckets.{sizes}", (4, 16, 64))
        yield


@contextmanager
def compiled_with(*, optimised: bool) -> Iterator[None]:
    """Compile with or without most of LLVM's work."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not optimised)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _late_programs(programs: Programs, *_: object) -> dict[ProgramName, _Late]:
    return {name: _Late(lower, programs._options) for name, lower in programs.lowerings().items()}


def _measure_nothing(executor: JaxExecutor, *_: object) -> LaunchTimes:
    times = LaunchTimes()
    for bucket in executor.config.buckets:  # the budget is at most the largest measured one
        times.measure_layers(bucket, lambda: None, 1)
    return times
