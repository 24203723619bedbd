"""Stages of large models compile for TPUs, keep the cache in place, and copy no weights.

    ./scripts/test -n 0 -m aot tests/aot/test_stages.py

takes about five minutes on two cores, and updates the table in docs/measured/aot-stages.md.
"""

from collections.abc import Iterator

import pytest

from orca_jax.model.describe import read_model_config
from tests.aot.compilers import skip_without
from tests.aot.stages import Split, compile_stage
from tests.aot.table import recorded_rows

skip_without("libtpu")

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.timeout(900)]

GIB = 1 << 30
HEADER = ["model", "stage", "T", "weights, GiB", "KV cache, GiB", "temporary, GiB"]
SPLITS = [
    Split("v5p:2x2x4", "gpt3-175b", stages=2, chips=8),
    Split("v5p:2x4x4", "gpt3-341b", stages=4, chips=8),
    Split("v6e:2x4", "llama-3-70b", stages=1, chips=8),
    Split("v6e:2x4", "llama-3-70b", stages=2, chips=4),
]
STAGES = [
    (split, index)
    for split in SPLITS
    for index in range(split.stages)
    if index in (0, 1, split.stages - 1)
]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    yield from recorded_rows(request, "stages", HEADER)


@pytest.mark.parametrize(("split", "index"), STAGES, ids=str)
def test_stage(split: Split, index: int, rows: list[list[str]]) -> None:
    model = read_model_config(f"preset:{split.preset}")
    # 192 tokens: with 256, activations have as many numbers as some weights.
    found = compile_stage(
        split, index, model, tokens=192, rows=64, max_model_len=2048, num_pages=512
    )
    assert found.program.alias >= found.kv, "the cache is not updated in place"
    assert not found.program.copies
    assert not found.program.copies_of_weights
    assert found.program.temp < found.weights / 50, "less than the weights of a layer"
    sizes = [f"{size / GIB:.2f}" for size in (found.weights, found.kv, found.program.temp)]
    rows.append([str(split), f"{index + 1} of {split.stages}", "192", *sizes])
