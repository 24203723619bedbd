"""The comparison of lowered texts: names and places in a file do not matter, also within kernels; the work does."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lab import lowered


def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


def twice_as_much(value: jax.Array) -> jax.Array:
    return 2 * value


def trebled(x: jax.Array) -> jax.Array:
    return 3 * x


def plain(work: Callable[[jax.Array], jax.Array]) -> jax.stages.Lowered:
    def program(x: jax.Array) -> jax.Array:
        return jax.jit(work)(x) + 1

    program.__name__ = f"program_of_{work.__name__}"
    return jax.jit(program).lower(jnp.ones(4))


def kernel(work: Callable[[jax.Array], jax.Array]) -> jax.stages.Lowered:
    """A kernel for TPUs, of which only the bytecode depends on `work`."""

    def run(source: Any, target: Any) -> None:
        target[...] = work(source[...])

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(
        run, out_shape=shape, name="kernel", compiler_params=pltpu.CompilerParams()
    )
    return jax.jit(call).trace(shape).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("lower", [plain, kernel])
def test_only_the_work_matters(lower: Callable[..., jax.stages.Lowered]) -> None:
    one, same, other = (lowered.text_of(lower(work)) for work in (doubled, twice_as_much, trebled))
    assert one == same
    assert one != other
    assert "arith" in one or lower is plain, "the text of the kernel, not its bytecode"


def test_a_difference_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(work: Callable[[jax.Array], jax.Array], **folder: Path) -> int:
        monkeypatch.setattr(
            lowered, "programs", lambda wanted: [("cpu/toy/layers-1", lambda: plain(work))]
        )
        return lowered.run(
            argparse.Namespace(**{"write": None, "compare": None, "only": "", **folder})
        )

    assert run(doubled, write=tmp_path) == run(twice_as_much, compare=tmp_path) == 0
    assert "differs" not in capsys.readouterr().out
    assert run(trebled, compare=tmp_path) == 1
    assert "cpu/toy/layers-1 differs" in capsys.readouterr().out


def test_nothing_to_compare_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered, "programs", lambda wanted: [])
    assert lowered.run(argparse.Namespace(write=None, compare=tmp_path, only="nothing")) == 1
