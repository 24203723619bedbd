"""Kernels and whole steps compile for an H200, keep the cache in place, and copy no layer's weights.

    .venv/bin/python -m pip install --no-deps jax-cuda12-plugin==<version of jax> jax-cuda12-pjrt==<the same>
    .venv/bin/python -m pytest -m aot tests/aot/test_gpu.py

needs `ptxas` beside them, from the CUDA toolkit or the wheel nvidia-cuda-nvcc-cu12. That shared memory and registers
suffice is part of compiling.
"""

import shutil

import pytest

from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.model.describe import read_model_config
from tests.aot.gpu import compile_attention, compile_step

pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs jax-cuda12-plugin and jax-cuda12-pjrt")
if shutil.which("ptxas") is None:
    pytest.skip("compiling for GPUs needs ptxas", allow_module_level=True)

pytestmark = [pytest.mark.aot, pytest.mark.timeout(400)]

MIB = 1 << 20
NAMED = ((1, 1),)  # requests of a case are not compiled for
HEADS = [
    Case("32 over 8 heads of 128", NAMED, 32, 8, 128, 64),
    Case("12 heads of 64, pages of 128", NAMED, 12, 12, 64, 128),
    Case("25 heads of 64, pages of 16", NAMED, 25, 25, 64, 16),
    Case("4 over 1 heads of 128, pages of 256", NAMED, 4, 1, 128, 256),
    Case("64 over 1 heads of 128, pages of 32", NAMED, 64, 1, 128, 32),
    Case("window and soft cap", NAMED, 8, 4, 128, 64, sliding_window=1000, soft_cap=50.0),
]
STEPS = [("gpt2", 64, 1), ("gpt2", 512, 1), ("llama-3-8b", 64, 1), ("llama-3-8b", 512, 1), ("llama-3-8b", 64, 4)]


@pytest.mark.parametrize("case", [HEADS[0], *(pytest.param(case, marks=pytest.mark.slow) for case in HEADS[1:])])
def test_kernels(case: Case) -> None:
    found = compile_attention(case, rows=64, tokens=256, pages_per_row=64)
    assert found.kernels == 3
    assert found.temp < 32 * MIB, "the cache of 256 MiB was copied"


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "tokens", "chips"), STEPS)
def test_whole_step(preset: str, tokens: int, chips: int) -> None:
    model = read_model_config(f"preset:{preset}")
    shapes = {"tokens": tokens, "rows": 64, "max_model_len": 1024, "num_pages": 256}
    found, kv_bytes = compile_step(model, **shapes, chips=chips)
    history = 4 * 64 * 1024
    assert found.alias == kv_bytes + history, "the cache is not updated in place"
    assert not found.copies_of_pages
    assert found.temp < 128 * MIB, "a layer's weights, or a layer's pages, were copied"
    assert found.kernels == 3 * model.num_layers
