"""Construction: the resolution of "auto", and errors for wrong settings before loading and compiling."""

from pathlib import Path
from typing import Any

import jax
import pytest

from orca_jax.assembly.choices import Budget, choices_of
from orca_jax.assembly.engine import build_engine
from orca_jax.exec import layers
from orca_jax.kernels.ragged_attention import BackendChoice, xla
from orca_jax.kernels.ragged_attention.api import BACKENDS
from orca_jax.values.config import DType, EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from orca_jax.values.startup import START_PHASES
from tests.covering import slow

MODEL = str(Path(__file__).parents[1] / "fixtures" / "reference" / "gpt2-12-heads")


def config(cache: str, **settings: Any) -> EngineConfig:
    small = {
        "model": MODEL,
        "tokenizer": "byte",
        "compile_cache": cache,
        "progress": False,
        "max_num_seqs": 4,
    }
    return EngineConfig(**{**small, "max_num_batched_tokens": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "param", "hint"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1"),
        ({"num_pages": 0}, "num_pages", "at least 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", r"\(0, 1\]"),
        ({"scheduler": "fastest"}, "scheduler", "orca, chunked, request_level"),
        (
            {"scheduler": "chunked", "scheduling_policy": "random"},
            "scheduling_policy",
            "fcfs, priority",
        ),
        (
            {"scheduler": "orca", "scheduling_policy": "fair"},
            "scheduling_policy",
            "needs scheduler chunked",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size", "at least 1"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size", "more than the 3 layers"),
        (
            {"pipeline_parallel_size": 3, "tensor_parallel_size": 6},
            "tensor_parallel_size",
            "their product",
        ),
        ({"max_model_len": 65}, "max_model_len", "64 positions"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size", "does not divide"),
        ({"tensor_parallel_size": 900}, "tensor_parallel_size", "devices"),
        ({"scheduler": "orca", "num_pages": 3, "n_slots": 10_000}, "num_pages", "raise num_pages"),
        ({"attention_implementation": "magic"}, "attention_implementation", "xla, reference"),
        ({"model": "no/such/directory"}, "model", "not a directory"),
        (
            {"model": "preset:toy", "scheduler": "chunked", "n_workers": 2},
            "n_workers",
            "iterations in flight",
        ),
        ({"model": "preset:toy", "scheduler": "chunked", "n_slots": 100}, "n_slots", "num_pages"),
        ({"model": "preset:gpt5"}, "model", "unknown preset"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(
    settings: dict[str, Any], param: str, hint: str, program_cache: str
) -> None:
    jax.devices()  # JAX has started, so the number of devices is fixed
    with pytest.raises(ConfigError, match=hint) as error:
        build_engine(config(program_cache, **settings))
    assert error.value.param == param


@pytest.mark.usefixtures("compiled_once", "few_programs", "quick_compiles")
def test_auto_on_a_cpu(program_cache: str) -> None:
    built = build_engine(config(program_cache, max_model_len=48))
    resolved = built.executor_config
    assert resolved is not None
    assert (resolved.dtype, resolved.cache.dtype) == ("float32", "float32")
    assert 12 % resolved.tensor_parallel_size == 0
    assert resolved.buckets[-1] == 4
    kv = built.engine.pool.kv
    assert kv.num_rows == 4
    assert kv.longest_request >= 4 * 48, "every row can hold a request of full length"
    assert built.max_model_len == 48
    assert built.start.programs > 0 and all(
        built.start.seconds[phase] > 0 for phase in START_PHASES
    )
    assert max(built.start.seconds.values()) <= built.start.total, "phases may overlap"
    summary = built.summary
    assert (summary.device, summary.num_devices) == ("cpu", resolved.tensor_parallel_size)
    assert (summary.dtype, summary.kv_cache_dtype, summary.attention) == (
        "float32",
        "float32",
        summary.products,
    )
    assert (summary.token_budget, summary.kv_tokens, summary.max_model_len) == (
        4,
        kv.longest_request,
        48,
    )
    assert summary.kv_requests >= 4
    built.close()


SECONDS = {32: 0.02, 64: 0.05, 128: 0.1, 256: 0.2, 512: 0.4, 1024: 0.8, 2048: 1.6}


@pytest.mark.parametrize(
    ("platform", "settings", "budget"),
    [
        ("cpu", {}, 256),
        ("cpu", {"itl_target_ms": 341.0}, 512),
        ("cpu", {"itl_target_ms": 339.0}, 256),
        ("cpu", {"itl_target_ms": 1.0}, 128),
        ("cpu", {"itl_target_ms": 1.0, "max_num_seqs": 65}, 256),
        ("cpu", {"max_num_batched_tokens": 100}, 100),
        ("cpu", {"scheduler": "orca"}, 512),
        ("tpu", {}, 512),
        ("gpu", {"itl_target_ms": 800.0}, 1024),
        ("gpu", {"scheduler": "orca"}, 2048),
    ],
)
def test_the_token_budget_is_the_largest_launch_within_the_target(
    platform: str, settings: dict[str, Any], budget: int
) -> None:
    """A measured launch has a full batch, and takes longer than most."""
    assert choices_of(EngineConfig(**settings)).budget.tokens(platform, SECONDS) == budget


def test_the_measured_budget_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        Budget(None, 64, itl_target_ms=300.0).tokens("cpu", {64: 0.05, 128: 0.1, 256: 0.2})
    assert (
        "token budget 256: launches of 128, 256 tokens take 100, 200 ms, and 300 ms" in caplog.text
    )


def test_larger_launches_than_the_first_beyond_the_target_are_not_measured() -> None:
    budget, cases = (
        Budget(None, 64, itl_target_ms=300.0),
        ((64, 1.0), (128, 0.3), (128, 0.4), (256, 0.4)),
    )
    found = [budget.is_enough("cpu", size, seconds) for size, seconds in cases]
    assert found == [False, False, True, True], (
        "128 is the smallest default, and a launch has 85 % of the target"
    )
    assert not Budget(512, 64).is_enough("cpu", 512, 9.0), "a wanted size is measured"


def test_few_launches_are_candidates_on_a_cpu() -> None:
    """Each is compiled. Other schedulers have finer ones."""
    assert [size for size in Budget(None, 64).sizes("cpu") if size >= 128] == [128, 256, 512]
    assert [size for size in Budget(None, 300).sizes("cpu") if size >= 512] == [512, 600]
    assert Budget(None, 64).sizes("cpu", skips_padding=True) == (1, 8, 32, 128, 512)
    assert Budget(40, 64).sizes("cpu")[-1] == 40
    assert {192, 384, 512} < set(Budget(None, 64, has_token_budget=False).sizes("cpu"))
    assert {192, 384, 512, 2048} < set(Budget(None, 64).sizes("gpu"))


@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
@pytest.mark.parametrize(
    ("dtype", "multiplies", "pages"),
    [
        ("bfloat16", True, "bfloat16"),
        slow("bfloat16", False, "float32"),
        slow("float16", True, "float32"),
    ],
)
def test_the_type_of_the_cache_on_a_cpu(
    dtype: DType, multiplies: bool, pages: str, program_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of bfloat16 are only quicker on a processor that has them."""
    monkeypatch.setattr("orca_jax.assembly.resolve.multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(
        "orca_jax.kernels.ragged_attention.xla.multiplies_bfloat16", lambda: multiplies
    )
    with build_engine(config(program_cache, max_model_len=48, dtype=dtype)) as built:
        assert built.executor_config is not None and built.executor_config.cache.dtype == pages
        built.engine.add_request(
            "one", [5, 3, 8], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        )
        tokens = []
        while built.engine.has_work:
            tokens += [token for update in built.engine.step() for token in update.new_ids]
    assert len(tokens) == 3


@pytest.mark.parametrize(("is_slow", "level"), [(False, "INFO"), (True, "WARNING")])
def test_the_choice_of_attention_is_logged(
    is_slow: bool,
    level: str,
    program_cache: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explain(*shapes: object) -> BackendChoice:
        return BackendChoice(BACKENDS[0], "the default of this device", is_slow)

    def stop(*shapes: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layers, "explain_attention", explain)
    # before programs compile in its threads
    monkeypatch.setattr("orca_jax.assembly.executor.start_executor", stop)
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        build_engine(config(program_cache))
    (record,) = [record for record in caplog.records if record.name == "orca_jax.assembly.resolve"]
    assert record.levelname == level
    assert "attention by 'tpu': the default of this device" in record.message


def test_an_implementation_that_cannot_do_the_shapes_is_refused_before_compilation(
    program_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla, "refusal", lambda q, pages: "heads of 7")
    with pytest.raises(
        ConfigError, match="heads of 7; leave attention_implementation out"
    ) as error:
        build_engine(config(program_cache, attention_implementation="xla"))
    assert error.value.param == "attention_implementation"


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
def test_reference_attention_serves_too(program_cache: str) -> None:
    settings = {
        "attention_implementation": "reference",
        "tensor_parallel_size": 1,
        "num_pages": 20,
        "page_size": 8,
    }
    with build_engine(config(program_cache, **settings, max_num_seqs=2)) as built:
        assert built.executor_config is not None
        assert built.executor_config.attention_implementation == "reference"
        built.engine.add_request(
            "one", [5, 3, 8], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        )
        tokens = []
        while built.engine.has_work:
            tokens += [token for update in built.engine.step() for token in update.new_ids]
    assert len(tokens) == 3
