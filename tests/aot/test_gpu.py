"""Kernels and whole steps compile for an H200 and an A100, keep the cache in place, and copy no layer's weights.

    ./scripts/test -n 0 -m aot tests/aot/test_gpu.py

takes some 10 minutes on two cores, and updates the table in docs/measured/aot-gpu.md. The compiler itself checks that
shared memory and registers suffice.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.assembly.resolve import explain
from orca_jax.exec.cache import workspace_bytes
from orca_jax.exec.sampling.draw import Kind
from orca_jax.kernels.matmul import MatrixKind
from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.kernels.ragged_attention.hopper import assembler
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig
from orca_jax.values.startup import EngineSummary, StartTimes
from tests.aot.compilers import skip_without
from tests.aot.gpu import (
    CARDS,
    compile_attention,
    compile_experts,
    compile_sampler,
    compile_states,
    compile_step,
    compile_write,
    mesh_of,
)
from tests.aot.models import (
    DELTA_RULE,
    MODELS,
    NUM_STATES,
    PUBLISHED,
    SMALL,
    STATE_SIZES,
    StateSizes,
)
from tests.aot.ptxas import write_wrapper
from tests.aot.table import recorded_rows, slow_but

skip_without("jax_cuda12_plugin")

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

MIB = 1 << 20
SHARED = {"A100": 163 << 10, "H200": 227 << 10}  # the most bytes for a thread block
HEADER = [
    "program",
    "for",
    "T",
    "temporary, MiB",
    "launches",
    "registers",
    "spilled, B",
    "shared, KiB",
]
MANY = 40_000  # pages of a MiB in four layers of Llama-3-8B
NAMED = ((1, 1),)  # a program does not depend on the requests of a case
BF16: dict[str, Any] = {"dtype": "bfloat16", "page_dtype": "bfloat16"}
LLAMA = Case("32 over 8 heads of 128", NAMED, 32, 8, 128, 64, **BF16)
HOPPER = [
    LLAMA,
    Case("12 heads of 64, pages of 128", NAMED, 12, 12, 64, 128, **BF16),
    Case("25 heads of 64, pages of 16", NAMED, 25, 25, 64, 16, **BF16),
    Case("32 heads of 128", NAMED, 32, 32, 128, 64, **BF16),
    Case("4 over 1 heads of 128, pages of 256", NAMED, 4, 1, 128, 256, **BF16),
    Case("64 over 1 heads of 128, pages of 32", NAMED, 64, 1, 128, 32, **BF16),
    Case("window and soft cap", NAMED, 8, 4, 128, 64, sliding_window=1000, soft_cap=50.0, **BF16),
    Case(
        "64 over 8 heads of 64 with sinks",
        NAMED,
        64,
        8,
        64,
        64,
        sliding_window=128,
        has_sinks=True,
        **BF16,
    ),
]
NARROW = [  # Hopper's own kernels cannot store rows of these
    Case("4 heads of 80", NAMED, 4, 4, 80, 16, **BF16),
    Case("8 over 2 heads of 96", NAMED, 8, 2, 96, 32, **BF16),
]
REFUSED = [
    Case(
        "float16, 32 over 8 heads of 128",
        NAMED,
        32,
        8,
        128,
        64,
        dtype="float16",
        page_dtype="float16",
    ),
    Case("4 heads of 48", NAMED, 4, 4, 48, 16, **BF16),
    Case("8 over 2 heads of 112", NAMED, 8, 2, 112, 64, **BF16),
    Case("4 heads of 192", NAMED, 4, 4, 192, 64, **BF16),
    Case(
        "16 over 8 heads of 256, capped",
        NAMED,
        16,
        8,
        256,
        64,
        sliding_window=4096,
        soft_cap=50.0,
        **BF16,
    ),
    Case("float32, 12 heads of 64", NAMED, 12, 12, 64, 64, page_dtype="float32"),
    Case("float32, 8 over 4 heads of 128", NAMED, 8, 4, 128, 64, page_dtype="float32"),
    Case(
        "int8 pages, 32 over 8 heads of 128",
        NAMED,
        32,
        8,
        128,
        64,
        dtype="bfloat16",
        page_dtype="int8",
    ),
    Case(
        "fp8 pages, 32 over 8 heads of 128",
        NAMED,
        32,
        8,
        128,
        64,
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
    ),
]
LATENTS = [
    Case("latents of 16 heads", NAMED, 16, 1, 576, 128, has_values=False, **BF16),
    Case("latents of 64 heads, pages of 64", NAMED, 64, 1, 576, 64, has_values=False, **BF16),
    Case(
        "int8 latents of 16 heads",
        NAMED,
        16,
        1,
        576,
        128,
        has_values=False,
        dtype="bfloat16",
        page_dtype="int8",
    ),
    Case(
        "fp8 latents of 16 heads",
        NAMED,
        16,
        1,
        576,
        128,
        has_values=False,
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
    ),
]
KERNELS = [("H200", "gpu", case) for case in HOPPER]
KERNELS += [("A100", "triton", case) for case in HOPPER + NARROW + REFUSED]
KERNELS += [("H200", "triton", case) for case in NARROW + REFUSED]
KERNELS += [(card, "triton_latents", case) for card in CARDS for case in LATENTS]
STEPS = [
    (card, chips, preset, tokens)
    for card in ("H200", "A100")
    for preset in ("gpt2", "llama-3-8b")
    for chips in (1, 4)
    for tokens in (64, 512)
]
STATEFUL = [("H200", 1, name, 64) for name in SMALL]
STATEFUL += [
    ("H200", 1, "LFM3", 64),
    *(("H200", PUBLISHED[name]["H200"], name, 64) for name in PUBLISHED),
    ("H200", 1, "Qwen3.5 9B", 2048),
    ("A100", 1, "Qwen3.5 9B", 64),
]
LINEAR = ("small MiniMax", "Qwen3.5 9B")  # models with linear attention
WRITES = [
    ("H200", LLAMA),
    ("A100", LLAMA),
    ("H200", HOPPER[2]),
    ("H200", REFUSED[-2]),
    ("A100", REFUSED[-1]),
]
# in continuous integration: some seconds each
QUICK = [KERNELS[0], ("A100", "triton", LLAMA), WRITES[0]]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    yield from recorded_rows(request, "gpu", HEADER)


@pytest.fixture(scope="module")
def ptxas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a wrapper around `ptxas`. A process looks for the compiler only once."""
    folder = tmp_path_factory.mktemp("ptxas")
    write_wrapper(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
        yield folder


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Case | StateSizes) else str(value)


@pytest.mark.parametrize(("card", "name", "case"), slow_but(QUICK, KERNELS), ids=name_of)
def test_kernels(card: str, name: str, case: Case, ptxas: Path, rows: list[list[str]]) -> None:
    tokens = 256 if case.has_values else 1024  # with large tiles
    found = compile_attention(ptxas, card, name, case, rows=64, tokens=tokens)
    assert found.kernels == (2 if name == "gpu" else 3)
    # the results of 64 heads of latents take 72 MiB
    most = 64 if case.has_values else 128
    assert found.temp < most * MIB, "the cache of 256 MiB was copied"
    assert 0 < found.registers <= 255
    assert not found.misaligned, "the hardware faults at such addresses"
    assert found.spilled <= 256 or case.dtype == "float32"
    assert (found.shared or 0) <= SHARED[card]
    assert not found.outside_graphs, "the host starts some kernels one by one"
    rows.append([f"`{name}`, {case.name}", card, str(tokens), *found.cells])


@pytest.mark.parametrize(("card", "case"), slow_but(QUICK, WRITES), ids=name_of)
def test_writing_is_in_place(card: str, case: Case, ptxas: Path, rows: list[list[str]]) -> None:
    found, kv_bytes = compile_write(ptxas, card, case, rows=64, tokens=256)
    assert found.alias == kv_bytes
    assert not found.copies
    assert found.temp < (160 if case.page_dtype in ("int8", "float8_e4m3fn") else 4) * MIB
    rows.append([f"`write_kv`, {case.name}", card, "256", *found.cells])


def test_the_line_at_start_names_the_kernels_for_hopper(
    ptxas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the newest packages for CUDA 12, whose runtime has the number of one that comes with a wrong assembler."""
    monkeypatch.setattr(assembler, "cuda_runtime", lambda: 12090)
    assembler.ptxas_version.cache_clear()
    mesh, model = mesh_of("H200"), read_model_config("preset:llama-3-8b")
    cache = CacheConfig(one_group(model.layer_caches), (64,), 128, "bfloat16", "token_major")
    config = ExecutorConfig("bfloat16", 1, (64,), 8, 1024, cache)
    name = explain(model, config, mesh)
    kind, report = mesh.devices.flat[0].device_kind, StartTimes().report()
    summary = EngineSummary(
        1024, 8192, 8, 64, "chunked", report, kind, 1, "bfloat16", "bfloat16", name
    )
    assert f"on 1 x {kind}, bfloat16, attention by gpu; " in summary.line("llama-3-8b")


EXPERTS = [
    (card, kind, tokens)
    for card in CARDS
    for kind in (None, "int8", "fp8", "int4", "fp4")
    for tokens in (64, 2048)
]


@pytest.mark.parametrize(
    ("card", "kind", "tokens"), slow_but([("H200", "fp4", 64)], EXPERTS), ids=name_of
)
def test_experts(
    card: str, kind: MatrixKind | None, tokens: int, ptxas: Path, rows: list[list[str]]
) -> None:
    """Each chosen expert is multiplied, and no matrix is copied or converted in memory."""
    found = compile_experts(ptxas, card, kind, tokens=tokens)
    assert found.kernels == 3
    assert not found.outside_graphs, "the host starts some kernels one by one"
    assert not found.copies
    # the rows of all choices: inputs, hidden vectors of two products, and results
    assert found.temp < 4.5 * tokens * 4 * 2880 * 4
    assert found.spilled <= 8
    assert found.shared is not None and found.shared <= SHARED[card]
    rows.append([f"experts, {kind or 'bfloat16'}", card, str(tokens), *found.cells])


STATES = [(card, sizes, tokens) for card in CARDS for tokens in (64, 2048) for sizes in STATE_SIZES]


@pytest.mark.parametrize(
    ("card", "sizes", "tokens"), slow_but([("H200", DELTA_RULE, 2048)], STATES), ids=name_of
)
def test_states(
    card: str, sizes: StateSizes, tokens: int, ptxas: Path, rows: list[list[str]]
) -> None:
    """The host is asked nothing, however many chunks there are, and states are updated in place."""
    found, num_bytes = compile_states(ptxas, card, sizes, rows=64, tokens=tokens)
    assert found.kernels == 3
    assert found.alias == num_bytes
    assert not found.copies
    assert not found.outside_graphs, "the host starts some kernels one by one"
    # factors of chunks, both halves of queries and keys, and results
    factors = tokens * (64 * (1 + sizes.has_beta) + sizes.values)
    pairs = 2 * tokens * sizes.keys * (sizes.pairs or sizes.heads)
    assert found.temp < 4 * (sizes.heads * factors + pairs) + 4 * MIB
    assert found.spilled <= 384
    assert found.shared is not None and found.shared <= SHARED[card]
    rows.append([sizes.name, card, str(tokens), *found.cells])


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("preset", ["gpt2", "llama-3-8b"])
@pytest.mark.parametrize("kind", ["greedy", "unfiltered", "filtered"])
def test_samplers_are_one_graph(
    card: str, preset: str, kind: Kind, ptxas: Path, rows: list[list[str]]
) -> None:
    found = compile_sampler(ptxas, card, read_model_config(f"preset:{preset}"), kind, width=64)
    assert not found.outside_graphs, "the device waits for its host"
    assert not found.copies
    rows.append([f"{kind} sampler, {preset}", card, "64", *found.cells])


@pytest.mark.slow
def test_a_large_cache_costs_no_launches(ptxas: Path) -> None:
    """XLA computes the plan of attention once, not in each layer, also for a KV cache of which three would not fit."""
    model = read_model_config("preset:llama-3-8b")
    model = replace(model, layers=model.layers[:4])

    def launches(num_pages: int, **options: Any) -> int:
        found, kv_bytes = compile_step(
            ptxas,
            "H200",
            model,
            tokens=64,
            rows=64,
            max_model_len=1024,
            num_pages=num_pages,
            **options,
        )
        assert num_pages < MANY or kv_bytes > 40e9
        return found.launches

    few = launches(256)
    assert launches(MANY) == few
    assert launches(MANY, options={}) > few, "XLA no longer needs the option"


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_step_of_layers_with_several_windows(card: str, ptxas: Path) -> None:
    """Seven layers of a Gemma 3 of 4B: a period and one more, with kernels for each window."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512}
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7, **heads}
    model = config_from_hf({"model_type": "gemma3_text", **sizes})
    shape = {"tokens": 64, "rows": 64, "max_model_len": 1024, "num_pages": 256}
    found, kv_bytes = compile_step(ptxas, card, model, **shape)
    assert found.alias == kv_bytes + 4 * 64 * 1024, "the cache is not updated in place"
    assert not found.copies
    assert not found.outside_graphs, "the host starts some kernels one by one"
    assert found.kernels == 3 * model.num_layers, (
        "those of Triton, also on Hopper, for heads of 256"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("card", "chips", "preset", "tokens"), STEPS)
def test_whole_step(
    card: str, chips: int, preset: str, tokens: int, ptxas: Path, rows: list[list[str]]
) -> None:
    model = read_model_config(f"preset:{preset}")
    found, kv_bytes = compile_step(
        ptxas, card, model, tokens=tokens, rows=64, max_model_len=1024, num_pages=256, chips=chips
    )
    history = 4 * 64 * 1024
    assert found.alias == kv_bytes + history, "the cache is not updated in place"
    assert not found.copies
    assert found.temp < 128 * MIB, "a layer's weights, or a layer's pages, were copied"
    assert chips > 1 or not found.outside_graphs, (
        "the host starts some kernels one by one"
    )  # sums over chips break graphs
    assert found.kernels == (2 if card == "H200" else 3) * model.num_layers
    assert found.spilled <= 8
    rows.append(
        [f"step, {preset}", card if chips == 1 else f"{card} x {chips}", str(tokens), *found.cells]
    )


@pytest.mark.parametrize(
    ("card", "chips", "name", "tokens"), slow_but(STATEFUL[: len(SMALL)], STATEFUL)
)
def test_step_with_states(
    card: str, chips: int, name: str, tokens: int, ptxas: Path, rows: list[list[str]]
) -> None:
    model = MODELS[name]
    shape = {
        "tokens": tokens,
        "rows": 64,
        "max_model_len": 1024,
        "num_pages": 256,
        "num_states": NUM_STATES[name],
    }
    found, cache_bytes = compile_step(ptxas, card, model, chips=chips, **shape)
    assert found.alias == cache_bytes + 4 * 64 * 1024, "pages or states are not updated in place"
    assert not found.copies
    assert name not in LINEAR or not found.outside_graphs, "the host starts some kernels one by one"
    assert found.temp < workspace_bytes(model, tokens, 64, 1024, chips) + 8 * MIB, (
        "the engine reserves less"
    )
    assert found.temp < 300 * MIB
    if model.latent is not None:
        # the others are those of experts, in fewer layers
        assert found.kernels >= 3 * model.num_layers, "attention over latents is not a kernel"
        assert not found.outside_graphs, "the host starts some kernels one by one"
    if name in PUBLISHED and model.experts is not None:
        one = 2 * model.experts.count * model.embed_dim * model.mlp_dim // chips
        assert found.temp < one, "matrices of all experts were copied"
    rows.append(
        [f"step, {name}", card if chips == 1 else f"{card} x {chips}", str(tokens), *found.cells]
    )
