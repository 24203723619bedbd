"""The choice of matrix products on a CPU, and engines with each of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from orca_jax import LLM, SamplingParams
from orca_jax.assembly import products, trial
from orca_jax.assembly.products import Products, choose_products
from orca_jax.assembly.support import Facts, check_support, quantised
from orca_jax.helpers.bundled import model_directory
from orca_jax.kernels import native
from orca_jax.kernels.native import Library
from orca_jax.model.describe import read_model_config
from orca_jax.model.stored_type import stored_dtype
from orca_jax.values.config import (
    CpuProducts,
    DType,
    EngineConfig,
    ModelConfig,
    Quantization,
    QuantizationName,
)
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import StoredForm
from tests.covering import slow
from tests.kernels.native.machine import library_of
from tests.model.gguf.test_gguf import write

WIDE = Library(32)
MATRIX = WIDE._replace(has_amx=True)
AVX512, BFLOAT16, AMX = "avx512f", "avx512_bf16", "amx_bf16"

Machine = Callable[..., None]


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return read_model_config("preset:gpt2-tiny")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets the library of this machine, the flags of its processor, and the result of a trial."""

    def refuse(*_: object) -> bool:
        raise AssertionError("a trial where none is needed")

    def be(library: Library | None, *flags: str, is_faster: bool | None = None) -> None:
        monkeypatch.setattr(native, "load_library", lambda directory: library)
        monkeypatch.setattr(
            trial, "is_faster", refuse if is_faster is None else lambda *_: is_faster
        )
        monkeypatch.setattr(products, "all_cpu_flags", lambda: flags)

    return be


def chosen(
    model: ModelConfig,
    wanted: CpuProducts = "auto",
    dtype: DType = "float32",
    platform: str = "cpu",
) -> Library | None:
    facts = Facts(EngineConfig(cpu_products=wanted, dtype=dtype), model=model, platform=platform)
    return choose_products(facts, None).library


def test_auto_takes_the_library_where_it_is_faster(model: ModelConfig, machine: Machine) -> None:
    machine(WIDE, AVX512, BFLOAT16)
    assert chosen(model) is WIDE and chosen(model, dtype="bfloat16") is WIDE
    assert chosen(model, "xla") is None and chosen(model, platform="tpu") is None
    machine(WIDE, AVX512, BFLOAT16, AMX)
    assert chosen(model) is WIDE and chosen(model, "native", "bfloat16") is WIDE
    machine(None, AVX512)
    assert chosen(model) is None


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_trial_decides_where_nothing_was_measured(
    model: ModelConfig, machine: Machine, is_faster: bool
) -> None:
    machine(MATRIX, AVX512, BFLOAT16, AMX, is_faster=is_faster)
    assert chosen(model, dtype="bfloat16") is (MATRIX if is_faster else None)
    machine(WIDE, AVX512, is_faster=is_faster)
    assert chosen(model, dtype="bfloat16") is (WIDE if is_faster else None)
    machine(WIDE, is_faster=is_faster)
    assert chosen(model) is (WIDE if is_faster else None)
    machine(WIDE)
    assert (
        chosen(model, "native") is WIDE
        and chosen(model, "xla") is None
        and chosen(model, platform="gpu") is None
    )


def test_models_without_plain_matrices_have_products_of_xla(
    model: ModelConfig, machine: Machine
) -> None:
    machine(WIDE, AVX512)
    others: tuple[tuple[ModelConfig, DType, str], ...] = (
        (replace(model, decoder="mine:Decoder"), "float32", "a decoder of your own"),
        (model, "float16", "weights in float16"),
    )
    for other, dtype, reason in others:
        assert chosen(other, dtype=dtype) is None
        with pytest.raises(
            ConfigError, match=f"native has no products with {reason}: use xla"
        ) as error:
            chosen(other, "native", dtype)
        assert error.value.param == "cpu_products"


def test_few_bits_need_no_trial(model: ModelConfig, machine: Machine) -> None:
    machine(WIDE)
    for kind in ("int8", "int4"):
        held = replace(model, quantization=kind)
        facts = Facts(EngineConfig(), model=held, platform="cpu")
        assert choose_products(facts, None) == ("float32", WIDE._replace(activation_bits=16))
        for dtype in get_args(DType):
            assert chosen(held, dtype=dtype) == (None if dtype == "float16" else WIDE)
        assert chosen(held, "xla") is None


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_published_integers_have_the_type_of_the_checkpoint(
    stored: DType,
    wanted: DType,
    model: ModelConfig,
    machine: Machine,
    tmp_path: Path,
) -> None:
    """Their plain tables would take twice the bytes in float32."""
    machine(WIDE, AVX512, BFLOAT16)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
    held = replace(model, stored=StoredForm("awq", 4, 128))
    facts = Facts(EngineConfig(), model=held, platform="cpu", source=str(tmp_path))
    assert choose_products(facts, None) == (wanted, WIDE._replace(activation_bits=16))


def test_a_type_of_the_settings_is_that_of_products_of_few_bits(
    model: ModelConfig, machine: Machine
) -> None:
    machine(WIDE)
    held = replace(model, quantization="int4")
    for dtype in ("float32", "bfloat16"):
        facts = Facts(EngineConfig(dtype=dtype), model=held, platform="cpu")
        assert choose_products(facts, None) == (dtype, WIDE)


@pytest.mark.parametrize("name", ["int8-dynamic", "int4-dynamic"])
def test_a_dynamic_quantisation_needs_the_library(
    name: QuantizationName, model: ModelConfig, machine: Machine
) -> None:
    config = EngineConfig(quantization=name)
    held = quantised(config, model)
    assert held.quantization == name.removesuffix("-dynamic")
    machine(WIDE)
    facts = Facts(config, model=held, platform="cpu")
    assert choose_products(facts, None).library == WIDE._replace(activation_bits=8)
    for other in (
        replace(facts, platform="gpu"),
        replace(facts, config=replace(config, cpu_products="xla")),
    ):
        with pytest.raises(
            ConfigError, match=f"{name} needs the products of the library in C.*; use int"
        ) as error:
            choose_products(other, None)
        assert error.value.param == "quantization"


def test_a_dynamic_quantisation_keeps_the_bits_of_a_file(
    tmp_path: Path, model: ModelConfig, machine: Machine
) -> None:
    """Those of a file with four bits; int4-dynamic does not keep eight."""
    machine(WIDE)
    for kind, kept in (
        (Kind.Q4_1, ("int8-dynamic", "int4-dynamic")),
        (Kind.Q8_0, ("int8-dynamic",)),
    ):
        path = str(write(tmp_path / f"{kind.name}.gguf", "qwen3", kind))
        for name in get_args(QuantizationName)[3:]:
            config = EngineConfig(quantization=name)
            held = quantised(config, model, path)
            assert held.quantization == (None if name in kept else "int4")
            facts = Facts(config, model=held, platform="cpu", source=path)
            assert choose_products(facts, None).library == WIDE._replace(activation_bits=8)


def test_gguf_files_of_few_bits_have_their_products(
    tmp_path: Path, model: ModelConfig, machine: Machine
) -> None:
    machine(WIDE, is_faster=False)
    path = write(tmp_path / "model.gguf", "qwen3", Kind.Q4_1)
    for settings, has_few_bits in (
        (EngineConfig(), True),
        (EngineConfig(load_format="dummy"), False),
    ):
        facts = Facts(settings, model=model, platform="cpu", source=str(path))
        assert facts.has_few_bits == has_few_bits
        assert choose_products(facts, None).library == (
            WIDE._replace(activation_bits=16) if has_few_bits else None
        )


def test_bits_of_experts_alone_do_not_choose_the_products(
    model: ModelConfig, machine: Machine, tmp_path: Path
) -> None:
    """The other matrices of such a file are plain."""
    machine(WIDE, is_faster=False)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    for form, has_few_bits in (
        (StoredForm("mxfp4", 4, 32, has_integers=False), False),
        (StoredForm("scaled", 4, 16, has_integers=False), True),
    ):
        held = replace(model, stored=form)
        facts = Facts(EngineConfig(), model=held, platform="cpu", source=str(tmp_path))
        assert facts.has_few_bits == has_few_bits
        library = choose_products(facts, None).library
        assert library == (WIDE._replace(activation_bits=16) if has_few_bits else None)


def checkpoint(folder: Path, values: dict[str, Any], **tensors: Any) -> Path:
    """A directory with a config.json, and safetensors if there are any."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_type_of_a_checkpoint(tmp_path: Path) -> None:
    """A GGUF file with few bits counts as one in bfloat16."""
    narrow, wide = np.zeros((2, 2), jnp.bfloat16), np.zeros(2, np.float32)
    directories: tuple[tuple[dict[str, Any], dict[str, Any], DType | None], ...] = (
        ({"torch_dtype": "bfloat16"}, {"a": wide}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, {"a": narrow}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, {}, "bfloat16"),
        ({"dtype": None}, {"a": narrow, "b": narrow, "c": wide}, "bfloat16"),
        ({"dtype": "float64"}, {}, None),
    )
    for number, (values, tensors, dtype) in enumerate(directories):
        assert stored_dtype(checkpoint(tmp_path / str(number), values, **tensors)) == dtype
    kinds: tuple[tuple[Kind, DType], ...] = (
        (Kind.F32, "float32"),
        (Kind.F16, "float32"),
        (Kind.BF16, "bfloat16"),
        (Kind.Q4_1, "bfloat16"),
    )
    for kind, dtype in kinds:
        assert stored_dtype(write(tmp_path / "model.gguf", "qwen3", kind)) == dtype
        (tmp_path / "model.gguf").unlink()
    assert (
        stored_dtype("preset:gpt2") is None and stored_dtype(model_directory("demo")) == "float32"
    )


def test_checkpoints_in_bfloat16_are_served_in_it_where_the_library_multiplies_it(
    tmp_path: Path, model: ModelConfig, machine: Machine
) -> None:
    source = str(checkpoint(tmp_path / "model", {"dtype": "bfloat16"}))

    def typed(**settings: Any) -> Products:
        return choose_products(
            Facts(EngineConfig(**settings), model=model, platform="cpu", source=source), None
        )

    machine(WIDE, AVX512, BFLOAT16)
    assert typed() == ("bfloat16", WIDE) and typed(dtype="float32") == ("float32", WIDE)
    assert typed(cpu_products="xla") == ("float32", None)
    machine(WIDE, is_faster=True)
    assert typed() == ("bfloat16", WIDE)
    machine(MATRIX, AVX512, BFLOAT16, AMX, is_faster=False)
    assert typed() == ("float32", MATRIX)
    machine(None)
    assert typed() == ("float32", None)


def test_a_library_that_is_wanted_and_absent_is_an_error(
    model: ModelConfig, machine: Machine
) -> None:
    machine(None, AVX512)
    with pytest.raises(ConfigError, match=r"needs Linux, .* and a C compiler \(cc\): use auto"):
        chosen(model, "native")


def test_other_devices_and_several_hosts_refuse_the_setting() -> None:
    with pytest.raises(ConfigError, match="no effect on tpu devices"):
        check_support(Facts(EngineConfig(cpu_products="xla"), platform="tpu"), "platform")
    with pytest.raises(ConfigError, match="needs nnodes 1") as error:
        check_support(Facts(EngineConfig(cpu_products="native"), num_hosts=2), "hosts")
    assert error.value.param == "cpu_products"


def run(program_cache: str, wanted: CpuProducts, **settings: Any) -> tuple[LLM, list[list[int]]]:
    """An engine, and the tokens of some prompts."""
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "strict_compile": True,
    }
    options = {
        "model": "preset:gpt2-tiny",
        "progress": False,
        "compile_cache": program_cache,
        **sizes,
        **settings,
    }
    llm = LLM(cpu_products=wanted, **options)
    prompts = [[*range(5, 5 + length)] for length in (1, 9, 23, 40)]
    results = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return llm, [list(each.outputs[0].token_ids) for each in results]


@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
@pytest.mark.parametrize(("dtype", "devices"), [slow("float32", 2), ("bfloat16", 1)])
def test_tokens_are_those_of_products_of_xla_under_every_schedule(
    dtype: DType, devices: int, program_cache: str
) -> None:
    """With other batches and divisions of prompts: in bfloat16 a product in another order would give other bits."""
    library_of()  # or skip
    tokens = []
    runs: tuple[tuple[CpuProducts, dict[str, Any]], ...] = (
        ("native", {}),
        ("native", {"max_num_batched_tokens": 4, "scheduler": "orca"}),
        ("xla", {"max_num_batched_tokens": 4}),
    )
    for wanted, settings in runs:
        llm, each = run(
            program_cache, wanted, dtype=dtype, tensor_parallel_size=devices, **settings
        )
        with llm:
            assert llm._built.summary.products == wanted
        tokens.append(each)
    assert tokens[1:] == [tokens[0]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
@pytest.mark.parametrize("devices", [1, 2])
def test_tokens_of_a_gguf_file_are_those_of_its_dequantised_matrices(
    devices: int, tmp_path: Path, program_cache: str
) -> None:
    library_of()  # or skip
    path = str(write(tmp_path / "model.gguf", "qwen3", Kind.Q4_0))
    settings = {
        "model": path,
        "tokenizer": "byte",
        "dtype": "float32",
        "tensor_parallel_size": devices,
    }
    tokens = []
    for wanted in get_args(CpuProducts)[1:]:
        llm, each = run(program_cache, wanted, **settings)
        with llm:
            assert llm._built.summary.products == wanted
        tokens.append(each)
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
@pytest.mark.parametrize(("kind", "devices"), [("int8", 1), ("int4", 2)])
def test_tokens_of_few_bits_are_those_of_xla(
    kind: Quantization, devices: int, program_cache: str
) -> None:
    """In float32 all tokens are equal; with 16 bits they do not depend on the schedule."""
    library_of()  # or skip
    of_kind = partial(run, program_cache, tensor_parallel_size=devices)
    other = {"max_num_batched_tokens": 4, "scheduler": "orca"}
    runs: tuple[tuple[CpuProducts, dict[str, Any]], ...] = (
        ("native", {"dtype": "float32"}), ("native", {"dtype": "float32", **other}), ("xla", {"dtype": "float32"}),
        ("native", {"dtype": "bfloat16"}), ("native", {"dtype": "bfloat16", **other}),
    )  # fmt: skip
    dynamic = {"quantization": f"{kind}-dynamic"}
    tokens = []
    for wanted, settings in (*runs, ("native", dynamic), ("native", {**dynamic, **other})):
        llm, each = of_kind(wanted=wanted, **{"quantization": kind, **settings})
        with llm:
            assert llm._built.summary.products == wanted + " in 8 bits" * (
                "quantization" in settings
            )
        tokens.append(each)
    assert tokens[1:3] == [tokens[0]] * 2 and tokens[3] == tokens[4] and tokens[5] == tokens[6]
