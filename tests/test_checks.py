"""Misspelt names and values of parameters: a typed error names each, and suggests the right one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.batch.args import parse_args as batch_args
from orca_jax.batch.config import BatchConfig
from orca_jax.serve.args import parse_args as serve_args
from orca_jax.server_config import ServerConfig
from orca_jax.tools.bench.__main__ import main as bench
from orca_jax.tools.timeline.__main__ import main as timeline
from orca_jax.values.checks import did_you_mean
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, OrcaError, RequestError
from orca_jax.values.request import StructuredOutput, Urgency

PYTHON: list[tuple[Callable[..., object], dict[str, Any], type[OrcaError], str]] = [
    (
        LLM,
        {"max_num_seq": 4},
        ConfigError,
        "LLM has no argument 'max_num_seq'; did you mean max_num_seqs?",
    ),
    (LLM, {"page_sizes": 16}, ConfigError, "did you mean page_size?"),
    (
        LLM,
        {"dtype": "fp16"},
        ConfigError,
        "dtype must be one of float32, bfloat16, float16, auto, got 'fp16'",
    ),
    (LLM, {"dtype": "fp16"}, ConfigError, "; did you mean float16?"),
    (LLM, {"dtype": "BF16"}, ConfigError, "; did you mean bfloat16?"),
    (LLM, {"kv_cache_dtype": "fp8_e5m2"}, ConfigError, "kv_cache_dtype must be one of"),
    (LLM, {"dtype": 16}, ConfigError, "dtype must be one of"),
    (LLM, {"scheduler": "orka"}, ConfigError, "; did you mean orca?"),
    (LLM, {"scheduling_policy": "Prio"}, ConfigError, "scheduling_policy must be one of"),
    (LLM, {"load_format": "safetensor"}, ConfigError, "; did you mean safetensors?"),
    (LLM, {"max_num_seqs": "8"}, ConfigError, "max_num_seqs must be an integer, got '8'"),
    (LLM, {"max_num_seqs": True}, ConfigError, "max_num_seqs must be an integer, got True"),
    (LLM, {"max_model_len": 4.5}, ConfigError, "max_model_len must be an integer or None, got 4.5"),
    (LLM, {"overlap": "no"}, ConfigError, "overlap must be true or false or None"),
    (
        LLM,
        {"gpu_memory_utilization": "90%"},
        ConfigError,
        "gpu_memory_utilization must be a number or None",
    ),
    (LLM, {"lora_modules": 4}, ConfigError, "lora_modules must be a list, each item a string"),
    (LLM, {"lora_modules": [1, 2]}, ConfigError, "lora_modules must be a list"),
    (LLM, {"model": None}, ConfigError, "model must be a string, got None"),
    (
        EngineConfig,
        {"n_slot": 4},
        ConfigError,
        "EngineConfig has no argument 'n_slot'; did you mean n_slots?",
    ),
    (
        ServerConfig,
        {"prot": 1},
        ConfigError,
        "ServerConfig has no argument 'prot'; did you mean port?",
    ),
    (ServerConfig, {"port": "80"}, ConfigError, "port must be an integer, got '80'"),
    (ServerConfig, {"api_key": "one"}, ConfigError, "api_key must be a list, each item a string"),
    (
        ServerConfig,
        {"overload_status": 500},
        ConfigError,
        "overload_status must be one of 429, 503, got 500",
    ),
    (ServerConfig, {"engine": "demo"}, ConfigError, "engine must be of type EngineConfig"),
    (
        BatchConfig,
        {"input": "a", "output": "b", "orders": "input"},
        ConfigError,
        "did you mean order?",
    ),
    (
        BatchConfig,
        {"input": "a", "output": "b", "order": "finish"},
        ConfigError,
        "did you mean finished?",
    ),
    (
        SamplingParams,
        {"max_token": 3},
        RequestError,
        "no argument 'max_token'; did you mean max_tokens?",
    ),
    (SamplingParams, {"max_new_tokens": 3}, RequestError, "did you mean max_tokens?"),
    (SamplingParams, {"best": 3}, RequestError, "the known ones are max_tokens, temperature"),
    (
        SamplingParams,
        {"ignore_eos": "yes"},
        RequestError,
        "ignore_eos must be true or false, got 'yes'",
    ),
    (SamplingParams, {"stop_token_ids": 5}, RequestError, "stop_token_ids must be a list, got 5"),
    (
        SamplingParams,
        {"stop_token_ids": "5"},
        RequestError,
        "stop_token_ids must be a list, got '5'",
    ),
    (SamplingParams, {"allowed_token_ids": 5}, RequestError, "allowed_token_ids must be a list"),
    (SamplingParams, {"bad_token_ids": [5]}, RequestError, "bad_token_ids must be a list, got 5"),
    (SamplingParams, {"logit_bias": [5]}, RequestError, "logit_bias must be a map"),
    (SamplingParams, {"cache_salt": 5}, RequestError, "cache_salt must be a string"),
    (
        SamplingParams,
        {"structured": {"kind": "regex"}},
        RequestError,
        "structured must be a StructuredOutput",
    ),
    (StructuredOutput, {"kind": "json"}, RequestError, "kind must be one of json_object"),
    (StructuredOutput, {"kind": "regexp"}, RequestError, "did you mean regex?"),
    (StructuredOutput, {"kind": "regex", "values": "a"}, RequestError, "did you mean value?"),
    (Urgency, {"prio": 3}, RequestError, "Urgency has no argument 'prio'"),
]


@pytest.mark.parametrize(("make", "arguments", "kind", "message"), PYTHON, ids=str)
def test_arguments_of_python(
    make: Callable[..., object], arguments: dict[str, Any], kind: type[OrcaError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        make(**arguments)
    assert message in str(caught.value)
    assert getattr(caught.value, "param", None) in arguments


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        dataclasses.replace(SamplingParams(), max_token=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean orca"):
        dataclasses.replace(EngineConfig(), scheduler="orka")  # type: ignore[arg-type]


def test_other_mistakes_of_a_call_are_those_of_python() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        StructuredOutput()  # type: ignore[call-arg]


def test_values_that_mean_the_same() -> None:
    """The names of vLLM for types, paths for strings, lists for tuples, integers of NumPy, and strings alone."""
    config = EngineConfig(
        Path("model"), dtype="half", kv_cache_dtype="float", max_num_seqs=np.int64(4)
    )  # type: ignore[arg-type]
    assert config == EngineConfig(
        "model", dtype="float16", kv_cache_dtype="float32", max_num_seqs=4
    )
    assert type(config.max_num_seqs) is int and type(config.model) is str
    assert EngineConfig(lora_modules=["a=b"]).lora_modules == ("a=b",)  # type: ignore[arg-type]
    assert BatchConfig("in.txt", "out").line_format == "text"  # type: ignore[arg-type]
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1
    assert SamplingParams(stop="END", bad_words="x") == SamplingParams(
        stop=("END",), bad_words=("x",)
    )  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


FLAGS: list[tuple[Callable[[list[str]], object], str, str]] = [
    (
        serve_args,
        "--max-num-seq 4",
        "unrecognized arguments: --max-num-seq; --max-num-seq: did you mean",
    ),
    (serve_args, "--max-num-seq 4", "did you mean --max-num-seqs?"),
    (serve_args, "--max-num-seq=4", "did you mean --max-num-seqs?"),
    (serve_args, "--dtype fp16", "did you mean float16?"),
    (serve_args, "--log-format jason", "did you mean json?"),
    (serve_args, "--prot 1", "did you mean --port?"),
    (batch_args, "-i a -o b --overwrit", "did you mean --overwrite?"),
    (batch_args, "--inputs a -o b", "required: -i/--input; --inputs: did you mean --input?"),
    (batch_args, "-i a -o b --order finish", "did you mean finished?"),
    (bench, "ofline", "did you mean offline?"),
    (bench, "offline --num-request 3", "did you mean --num-requests?"),
    (bench, "offline --trace orca_long", "did you mean orca-long?"),
    (bench, "offline --max-num-seq 3", "did you mean --max-num-seqs?"),
    (timeline, "x.jsonl --perfeto y", "did you mean --perfetto?"),
    (timeline, "x.jsonl --plot-unit second", "did you mean seconds?"),
]


@pytest.mark.parametrize(("parse", "flags", "message"), FLAGS)
def test_flags(
    parse: Callable[[list[str]], object],
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flags.split())
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--max-num 4", "--num-req 3"])
def test_no_flag_has_abbreviations(flags: str) -> None:
    """A later flag could take the meaning of an abbreviation."""
    with pytest.raises(SystemExit):
        bench(["offline", *flags.split()])


def test_flags_take_the_aliases_of_values() -> None:
    engine = serve_args(["--dtype", "half", "--kv-cache-dtype", "float"]).engine
    assert (engine.dtype, engine.kv_cache_dtype) == ("float16", "float32")


def test_contestants_of_a_benchmark_have_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bench(["schedulers", "--model", "preset:toy", "--schedulers", "chunked --max-num-seq 3"])
        == 2
    )
    assert "did you mean --max-num-seqs?" in capsys.readouterr().err


def test_a_file_of_settings_has_suggestions(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("max-num-seq: 3\n")
    with pytest.raises(ConfigError, match=r"did you mean max-num-seqs\?"):
        serve_args(["--config", str(path)])


def test_nothing_is_suggested_for_a_strange_name() -> None:
    assert did_you_mean("xyz", ["port", "host"]) == ""
    assert did_you_mean("PORT", ["port", "host"]) == "; did you mean port?"


def test_prompts_need_sampling_params() -> None:
    with LLM("preset:toy", max_num_seqs=2) as llm:
        for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], 3):
            with pytest.raises(RequestError, match="sampling_params must be a SamplingParams"):
                llm.generate("x", wrong, use_tqdm=False)  # type: ignore[arg-type]
