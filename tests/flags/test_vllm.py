"""vLLM's flags and keywords: all of a version are known, and those without an effect are taken and named."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from orca_jax.cli.chat import make_parser as chat_parser
from orca_jax.flags.vllm import SAME, has_no_effect, refused_flags, taken_flags, translated
from orca_jax.llm.arguments import engine_settings
from orca_jax.serve.args import make_parser, parse_args
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import REST_OF_CONTEXT, SamplingParams, StructuredOutput
from scripts.flags_page import VLLM_NAMES

NAMES = json.loads(VLLM_NAMES.read_text(encoding="utf-8"))
OWN = set(make_parser()._option_string_actions)
USUAL = """
    --enforce-eager --enable-chunked-prefill --enable-auto-tool-choice --disable-log-requests --swap-space 4
    --uvicorn-log-level warning --data-parallel-size 1 --disable-log-stats --max_num_seqs 8 -q int8 -O3
    --compilation-config {"mode":3} --limit-mm-per-prompt image=1 --cudagraph-capture-sizes 1 2 4 --dtype float32
"""


def is_decided(flag: str) -> bool:
    name = flag.removeprefix("--")
    return flag in OWN or SAME.get(flag) in OWN or name in taken_flags() or name in refused_flags()


def test_every_flag_is_taken_or_has_a_reason() -> None:
    flags = [f"--{name}" for name in (*NAMES["serve"], *NAMES["removed"])]
    assert len(flags) > 340 and [flag for flag in flags if not is_decided(flag)] == []
    short = [name for names in NAMES["serve"].values() for name in names]
    assert [name for name in short if name not in OWN and not is_decided(SAME[name])] == []


def test_no_flag_has_two_verdicts() -> None:
    assert not taken_flags().keys() & refused_flags().keys()
    assert not {f"--{name}" for name in taken_flags()} & OWN


def test_usual_flags_start_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_args(["preset:toy", *USUAL.split()])
    assert config.engine == EngineConfig(
        "preset:toy", max_num_seqs=8, quantization="int8", dtype="float32"
    )
    assert not config.log_requests
    (line,) = capsys.readouterr().err.splitlines()
    named = {word for word in line.replace(",", " ").split() if word.startswith("-")}
    honoured = {"--disable-log-requests", "--max_num_seqs", "-q", "--dtype"}
    assert named == {word for word in USUAL.split() if word.startswith("-")} - honoured


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--scheduler-cls X",
            "argument --scheduler-cls: vLLM's setting is not supported: code of a model",
        ),
        ("--scheduler_cls X", "code of a model"),
        ("--data-parallel-size 2", "argument --data-parallel-size: must be 1, got '2'"),
        ("-dp=2", "argument --data-parallel-size: must be 1, got '2'"),
        ("--data-parallel-size", "must be 1, got ''"),
        ("--no-enable-chunked-prefill", "use --scheduler orca"),
        ("--hf-overrides={}", "write it into config.json"),
    ],
)
def test_refused_flags_have_a_reason(
    flags: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(flags.split())
    assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_values_belong_to_their_flags() -> None:
    words = [
        "--numa-bind-cpus",
        "0",
        "-1",
        "--a_b",
        "x_y",
        "--swap-space=4",
        "M",
        "--",
        "--c_d",
        "--swap-space",
    ]
    kept, named = translated(words, {"--a-b"})
    assert kept == ["--a-b", "x_y", "M", "--", "--c_d", "--swap-space"]
    assert named == ["--numa-bind-cpus", "--swap-space"]
    assert translated(["--no-enforce-eager", "M", "--no-scheduler-cls"], ())[0] == ["M"]


def test_a_file_of_settings_takes_them_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("enforce_eager: true\nnum-gpu-blocks-override: 9\ndisable_log_requests: true\n")
    config = parse_args(["--config", str(path)])
    assert (config.engine.num_pages, config.log_requests) == (9, False)
    assert capsys.readouterr().err.endswith(": --enforce-eager\n")
    path.write_text("data-parallel-size: 2\n")
    with pytest.raises(ConfigError, match="data-parallel-size: must be 1, got 2: one engine"):
        parse_args(["--config", str(path)])


@pytest.mark.parametrize(
    "words",
    ["M --port 9", "--port 9 M", "--model M --port=9", "--port 9 --served-model-name a b -- M"],
)
def test_the_model_is_a_word_or_a_flag(words: str) -> None:
    config = parse_args(words.split())
    assert (config.engine.model, config.port) == ("M", 9)


def test_two_models_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["M", "--model", "N"], ["--model", "N", "M"]):
        with pytest.raises(SystemExit):
            chat_parser().parse_args(words)
        assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args(["--model", "N", "--max-num-seq", "4"])
    assert "--max-num-seq: did you mean --max-num-seqs?" in capsys.readouterr().err, "4 is no model"


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (["https://a", "app://b"], ("https://a", "app://b")),
        (['["https://a", "*"]'], ("https://a", "*")),
        (["[]"], ()),
    ],
)
def test_origins_may_be_a_list_in_json(words: list[str], origins: tuple[str, ...]) -> None:
    assert parse_args(["--allowed-origins", *words]).allowed_origins == origins


@pytest.mark.parametrize("word", ["[", '["https://a", 1]', '[""]'])
def test_other_lists_of_origins_are_refused(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(["--allowed-origins", word])
    assert caught.value.param == "allowed_origins"


@pytest.mark.parametrize("flag", ["--disable-overlap", "--no-overlaps", "--disable-progress"])
def test_no_suggestion_is_the_opposite(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([flag])
    _, _, hint = capsys.readouterr().err.partition("did you mean ")
    assert hint.startswith("--no-") or not hint


def test_every_keyword_of_llm_is_taken_or_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    fields = {*EngineConfig.__dataclass_fields__, "skip_tokenizer_init"}
    names = [
        name
        for name in NAMES["LLM"]
        if name not in fields and f"--{name.replace('_', '-')}" not in SAME
    ]
    assert [name for name in names if not has_no_effect(name.replace("_", "-"), None)] == []
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "trust_remote_code": False,
        "block_size": 8,
        "swap_space": 4,
    }
    with caplog.at_level(logging.WARNING):
        config = engine_settings("LLM", "M", {**settings, "seed": 3})
    assert config == EngineConfig("M", page_size=8, seed=3)
    assert "enforce_eager, swap_space, trust_remote_code" in caplog.text
    values: dict[str, Any] = {"quantization": "awq", "speculative_config": {"method": "mtp"}}
    with caplog.at_level(logging.WARNING):
        assert engine_settings("LLM", "M", values) == EngineConfig("M")
    assert "quantization (awq), speculative_config (mtp)" in caplog.text
    for name, value in (("scheduler_cls", "X"), ("data_parallel_size", 2), ("nothing", 1)):
        with pytest.raises(ConfigError) as caught:
            engine_settings("LLM", "M", {name: value})
        assert caught.value.param == name


def test_every_keyword_of_sampling_is_taken_or_has_a_reason() -> None:
    for name in NAMES["SamplingParams"]:
        if name not in SamplingParams.__dataclass_fields__:
            with pytest.raises(RequestError, match=f"{name} is refused: "):
                SamplingParams(**{name: None})


class Asked:
    """The form of vLLM's `StructuredOutputsParams`."""

    def __init__(self, **values: Any) -> None:
        self.json = self.regex = self.choice = self._backend = None
        self.__dict__ |= values


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        (Asked(json='{"type": "array"}'), "json_schema", '{"type": "array"}'),
        (Asked(choice=["a", "b"], _backend="x"), "choice", '["a", "b"]'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"json_object": True}, "json_object", ""),
    ],
)
def test_structured_outputs(given: object, kind: Any, value: str) -> None:
    assert SamplingParams(structured_outputs=given).structured == StructuredOutput(kind, value)


def test_wrong_arguments_of_sampling_are_named() -> None:
    both: dict[str, Any] = {"json": "{}", "regex": "a"}
    wrong: list[dict[str, Any]] = [
        {"structured_outputs": both},
        {"structured_outputs": {}},
        {"structured_outputs": 3},
    ]
    for fields in (
        *wrong,
        {"structured_outputs": {"regex": 3}},
        {"detokenize": False, "stop": "x"},
        {"detokenize": 1},
    ):
        with pytest.raises(RequestError):
            SamplingParams(**fields)
    assert SamplingParams(max_tokens=None).max_tokens == REST_OF_CONTEXT  # type: ignore[arg-type]
