"""Kernels and whole steps compile for TPUs, keep the cache in place, and fit into a chip's memories.

    ./scripts/test -n 0 -m aot tests/aot/test_tpu.py

takes about 20 minutes on two cores, and updates the table in docs/measured/aot-tpu.md.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.exec.cache import workspace_bytes
from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.values.config import ModelConfig
from tests.aot.compilers import skip_without
from tests.aot.models import (
    DELTA_RULE,
    MODELS,
    NUM_STATES,
    PUBLISHED,
    SMALL,
    STATE_SIZES,
    StateSizes,
)
from tests.aot.table import recorded_rows, slow_but
from tests.aot.tpu import (
    TOPOLOGIES,
    compile_attention,
    compile_layer,
    compile_sampler,
    compile_states,
    compile_step,
    compile_write,
)

skip_without("libtpu")

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]

MIB = 1 << 20
VMEM_BUDGET = 32 * MIB
HEADER = ["program", "for", "T", "in place, MiB", "temporary, MiB", "VMEM, MiB"]
STEPS = [
    (generation, chips, preset, tokens, "bfloat16")
    for generation in TOPOLOGIES
    for preset in ("gpt2", "llama-3-8b")
    for chips in (1, 4)
    for tokens in (64, 512)
    if (generation, preset, chips) != ("v5e", "llama-3-8b", 1)  # 15 GiB of weights on a chip of 16
] + [
    (generation, chips, preset, tokens, "int8")
    for generation, chips, preset in (
        ("v5e", 1, "gpt2"),
        ("v5e", 4, "llama-3-8b"),
        ("v5p", 4, "llama-3-8b"),
        ("v6e", 1, "llama-3-8b"),
        ("tpu7x", 1, "llama-3-8b"),
    )
    for tokens in (64, 512)
]
NAMED = ((1, 1),)  # the requests of a case do not matter to the compiler
HEADS = [
    Case("12 heads of 64", NAMED, 12, 12, 64, 128),
    Case("25 heads of 64", NAMED, 25, 25, 64, 16),
    Case("32 over 8 heads of 64", NAMED, 32, 8, 64, 64),
    Case("4 heads of 80", NAMED, 4, 4, 80, 16),
    Case("8 over 2 heads of 96", NAMED, 8, 2, 96, 32),
    Case("32 over 8 heads of 128", NAMED, 32, 8, 128, 128),
    Case("32 heads of 128", NAMED, 32, 32, 128, 128),
    Case("4 over 1 heads of 128", NAMED, 4, 1, 128, 256),
    Case("16 over 8 heads of 256", NAMED, 16, 8, 256, 64, sliding_window=4096, soft_cap=50.0),
    Case(
        "64 over 8 heads of 64 with sinks", NAMED, 64, 8, 64, 64, sliding_window=128, has_sinks=True
    ),
]


QUANTISED = [
    ("int8", Case("12 heads of 64", NAMED, 12, 12, 64, 128)),
    ("float8_e4m3fn", Case("25 heads of 64", NAMED, 25, 25, 64, 32)),
    ("int8", Case("8 over 2 heads of 96", NAMED, 8, 2, 96, 32)),
    ("int8", HEADS[5]),
    ("float8_e4m3fn", HEADS[5]),
    ("int8", HEADS[8]),
]
KERNELS = [(generation, "bfloat16", case) for generation in TOPOLOGIES for case in HEADS]
KERNELS += [(generation, dtype, case) for generation in TOPOLOGIES for dtype, case in QUANTISED]
ODD = Case("25 heads of 64", NAMED, 25, 25, 64, 64)
WRITTEN = [
    ("int8", HEADS[0]),
    ("int8", ODD),
    ("int8", HEADS[5]),
    ("float8_e4m3fn", HEADS[5]),
    ("int8", HEADS[8]),
]
WRITES = [(generation, dtype, case) for generation in TOPOLOGIES for dtype, case in WRITTEN]
LATENTS = [
    (
        generation,
        dtype,
        Case(f"latents of {heads} heads", NAMED, heads, 1, 576, 128, has_values=False),
    )
    for generation in TOPOLOGIES
    for dtype, heads in (("bfloat16", 16), ("bfloat16", 128), ("int8", 16), ("float8_e4m3fn", 16))
]
# In continuous integration: together they take some seconds.
QUICK = [
    ("v6e", "bfloat16", HEADS[7]),
    ("v5e", "int8", ODD),
    ("v5e", 4, "gpt2", 64, "bfloat16"),
    next(case for case in LATENTS if case[0] == "v6e"),
]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    yield from recorded_rows(request, "tpu", HEADER)


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


def budget(model: ModelConfig, tokens: int, chips: int) -> int:
    """Limit of a step's temporary memory in bytes: float32 activations, and 8 MiB for the kernels.

    For 64 tokens on one chip it is less than the weights of a layer.
    """
    split = 2 * (model.mlp_dim + model.num_heads * model.head_dim) // chips
    return 4 * tokens * (4 * model.embed_dim + split) + 8 * MIB


def mib(size: int) -> str:
    return f"{size / MIB:.1f}"


@pytest.mark.parametrize(("generation", "dtype", "case"), slow_but(QUICK, KERNELS), ids=name_of)
def test_kernels(generation: str, dtype: str, case: Case, rows: list[list[str]]) -> None:
    found = compile_attention(generation, case, dtype, rows=64, tokens=256, pages_per_row=64)
    assert found.temp < 16 * MIB, "the cache of 256 MiB was copied"
    assert 0 < found.vmem <= VMEM_BUDGET
    name = f"attention, {case.name}" if dtype == "bfloat16" else f"attention, {dtype}, {case.name}"
    rows.append([name, generation, "256", "-", mib(found.temp), mib(found.vmem)])


@pytest.mark.parametrize(("generation", "dtype", "case"), slow_but(QUICK, LATENTS), ids=name_of)
def test_latents(generation: str, dtype: str, case: Case, rows: list[list[str]]) -> None:
    found = compile_layer(generation, case, dtype, rows=64, tokens=64, pages_per_row=64)
    assert found.alias >= 255 * MIB, "the cache is not updated in place"
    assert not found.copies
    assert found.temp < 64 * MIB, "the cache of 256 MiB was copied"
    assert 0 < found.vmem <= VMEM_BUDGET
    name = case.name if dtype == "bfloat16" else f"{dtype}, {case.name}"
    sizes = mib(found.alias), mib(found.temp), mib(found.vmem)
    rows.append([f"attention and writing, {name}", generation, "64", *sizes])


@pytest.mark.parametrize(("generation", "dtype", "case"), slow_but(QUICK, WRITES), ids=name_of)
def test_writing_of_quantised_pages(
    generation: str, dtype: str, case: Case, rows: list[list[str]]
) -> None:
    found = compile_write(generation, case, dtype, rows=64, tokens=256, pages_per_row=64)
    assert found.alias >= 256 * MIB, "the cache is not updated in place"
    assert not found.copies
    assert found.temp < 8 * MIB
    assert 0 < found.vmem <= VMEM_BUDGET
    name = f"writing, {dtype}, {case.name}"
    rows.append([name, generation, "256", mib(found.alias), mib(found.temp), mib(found.vmem)])


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_scalar_memory_does_not_grow_with_the_context(
    generation: str, rows: list[list[str]]
) -> None:
    """1,024 rows of 128k tokens have a page table of 4 MiB; scalar memory has 1 MiB."""
    case = Case("1,024 rows of 128k", NAMED, 8, 2, 128, 128)
    found = compile_attention(
        generation, case, "bfloat16", rows=1024, tokens=1024, pages_per_row=1024
    )
    assert found.temp < 32 * MIB
    rows.append(
        [f"attention, {case.name}", generation, "1024", "-", mib(found.temp), mib(found.vmem)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", HEADS[:1] + HEADS[5:6], ids=name_of)
def test_float32(case: Case) -> None:
    assert (
        compile_attention("v5e", case, "float32", rows=64, tokens=256, pages_per_row=64).temp
        < 16 * MIB
    )


@pytest.mark.parametrize(
    ("generation", "chips", "preset", "tokens", "dtype"), slow_but(QUICK, STEPS)
)
def test_whole_step(
    generation: str, chips: int, preset: str, tokens: int, dtype: str, rows: list[list[str]]
) -> None:
    model = read_model_config(f"preset:{preset}")
    sizes = {"tokens": tokens, "rows": 64, "max_model_len": 1024, "num_pages": 256}
    found, kv_bytes = compile_step(generation, chips, model, cache_dtype=dtype, **sizes)
    assert found.alias >= kv_bytes, "the cache is not updated in place"
    assert not found.copies
    assert not found.copies_of_weights
    assert found.temp < budget(model, tokens, chips)
    assert 0 < found.vmem <= VMEM_BUDGET
    chip = generation if chips == 1 else f"{generation} x {chips}"
    name = f"step, {preset}" if dtype == "bfloat16" else f"step, {preset}, {dtype}"
    rows.append([name, chip, str(tokens), mib(found.alias), mib(found.temp), mib(found.vmem)])


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_step_of_layers_with_several_windows(generation: str) -> None:
    """A Gemma 3 of 1B: one kernel serves both windows, and a scan its 26 layers, without a copy."""
    sizes = {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    model = config_from_hf(
        {
            "model_type": "gemma3_text",
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            **sizes,
        }
    )
    shape = {"tokens": 64, "rows": 64, "max_model_len": 1024, "num_pages": 256}
    found, kv_bytes = compile_step(generation, 1, model, **shape)
    assert found.alias >= kv_bytes, "the cache is not updated in place"
    assert not found.copies
    assert not found.copies_of_weights
    assert found.temp < budget(model, 64, 1)
    assert 0 < found.vmem <= VMEM_BUDGET


@pytest.mark.parametrize(
    ("generation", "sizes"),
    slow_but(
        [("v6e", DELTA_RULE)],
        [(each, sizes) for each in ("v5e", "v6e") for sizes in STATE_SIZES[:2]],
    ),
)
def test_states(generation: str, sizes: StateSizes, rows: list[list[str]]) -> None:
    """The kernel reads and writes the states of single tokens in place: XLA would copy those of all rows."""
    found, num_bytes = compile_states(generation, sizes, rows=64, tokens=64)
    assert found.alias == num_bytes
    assert not found.copies
    assert found.temp < num_bytes / 2 / 16
    assert 0 < found.vmem <= VMEM_BUDGET
    rows.append([sizes.name, generation, "64", mib(found.alias), mib(found.temp), mib(found.vmem)])


@pytest.mark.parametrize(
    ("generation", "chips", "name", "tokens"),
    [
        *(("v6e", 1, name, 64) for name in SMALL),
        *(
            pytest.param(generation, PUBLISHED[name][generation], name, 64, marks=pytest.mark.slow)
            for generation in ("v5e", "v6e")
            for name in PUBLISHED
        ),
    ],
)
def test_step_with_states(
    generation: str, chips: int, name: str, tokens: int, rows: list[list[str]]
) -> None:
    """A copy of the states of one layer would not fit into the temporary memory that the engine reserves."""
    model = MODELS[name]
    shape = {"tokens": tokens, "rows": 64, "max_model_len": 1024}
    found, cache_bytes = compile_step(
        generation, chips, model, num_pages=256, num_states=NUM_STATES[name], **shape
    )
    assert found.alias >= cache_bytes, "pages or states are not updated in place"
    assert not found.copies
    assert not found.copies_of_weights
    assert found.temp < workspace_bytes(model, tokens, 64, 1024, chips) + 8 * MIB, (
        "the engine reserves less"
    )
    assert 0 < found.vmem <= VMEM_BUDGET
    chip = generation if chips == 1 else f"{generation} x {chips}"
    sizes = mib(found.alias), mib(found.temp), mib(found.vmem)
    rows.append([f"step, {name}", chip, str(tokens), *sizes])


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize(
    ("generation", "preset"), sorted({(case[0], case[2]) for case in STEPS if case[1] == 1})
)
def test_sampler(generation: str, preset: str, is_full: bool, rows: list[list[str]]) -> None:
    model = read_model_config(f"preset:{preset}")
    found = compile_sampler(generation, model, rows=64, max_model_len=1024, is_full=is_full)
    assert not found.copies_of_weights, "the unembedding was copied"
    assert found.temp < workspace_bytes(model, 0, 64, 1024), "the engine reserves less"
    name = "full" if is_full else "plain"
    rows.append([f"{name} sampler, {preset}", generation, "64", "-", mib(found.temp), "-"])
