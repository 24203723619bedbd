"""Real command lines of vLLM: at least 60 of 73 start, and each other one is refused with its reason."""

import json
import tomllib
from pathlib import Path

import pytest

from orca_jax.flags.program import flag_message
from orca_jax.helpers import bundled
from orca_jax.helpers.hub.models import HubModel
from orca_jax.serve.args import parse_args
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.speculation import SpeculativeConfig

LINES = tomllib.loads(Path(__file__).with_name("vllm_lines.toml").read_text(encoding="utf-8"))
NAMED = "no effect here, as docs/vllm.md explains: "


def started(line: str) -> ServerConfig:
    """The settings of a server that is started with a line."""
    return parse_args(["preset:toy", *line.split()])


def fault(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error for which a line is refused."""
    try:
        started(line)
    except ConfigError as error:
        return flag_message(error)
    except SystemExit as error:
        assert error.code == 2
        return capsys.readouterr().err
    raise AssertionError("the line is taken")


def test_there_are_enough_lines() -> None:
    assert len(LINES["taken"]) + len(LINES["refused"]) == 73
    assert len(LINES["taken"]) >= 60


@pytest.mark.parametrize("line", LINES["taken"])
def test_a_line_is_taken(line: str) -> None:
    assert started(line).engine.model == "preset:toy"


@pytest.mark.parametrize("line", LINES["refused"])
def test_another_line_is_refused_with_its_reason(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LINES["refused"][line] in fault(line, capsys)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--trust-remote-code", "--trust-remote-code"),
        ("--cuda-graph-sizes 1 2 4 --seed 1", "--cuda-graph-sizes"),
        ("--distributed-executor-backend ray", "--distributed-executor-backend"),
        ("--compilation-config.level 3", "--compilation-config.level"),
        ("--quantization awq", "--quantization (awq)"),
        ("-q=gptq", "--quantization (gptq)"),
        ("--load-format runai_streamer", "--load-format (runai_streamer)"),
        (
            "--speculative-config.method mtp --speculative-config.num_speculative_tokens 1",
            "--speculative-config (mtp)",
        ),
        (
            '-sc {"method":"eagle3","model":"m","num_speculative_tokens":2}',
            "--speculative-config (eagle3)",
        ),
        ('--allowed-methods ["*"]', "--allowed-methods"),
    ],
)
def test_what_has_no_effect_is_named(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = started(line)
    assert capsys.readouterr().err == f"{NAMED}{named}\n"
    assert (config.engine.quantization, config.engine.speculative_config) == (None, None)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--quantization fp8", EngineConfig("preset:toy", quantization="fp8")),
        (
            "--speculative-config.method ngram --speculative_config.num_speculative_tokens=3",
            EngineConfig("preset:toy", speculative_config=SpeculativeConfig("ngram", 3)),
        ),
        (
            '--enable-lora --lora-modules a=b {"name":"c","path":"d","base_model_name":"e"}',
            EngineConfig(
                "preset:toy",
                enable_lora=True,
                lora_modules=("a=b", '{"name":"c","path":"d","base_model_name":"e"}'),
            ),
        ),
    ],
)
def test_what_has_a_meaning_here_is_honoured(
    line: str, settings: EngineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(line).engine == settings
    assert not capsys.readouterr().err


def test_adapters_in_json() -> None:
    modules = ("a=b", '{"name":"c","path":"d","base_model_name":"e"}')
    assert EngineConfig(lora_modules=modules).lora_paths == {"a": "b", "c": "d"}


@pytest.mark.parametrize(
    "module",
    [
        "{",
        "{}",
        '{"name":"a"}',
        '{"name":"a","path":3}',
        '{"name":"a","path":"b","rank":1}',
        "{" * 100_000,
    ],
)
def test_wrong_adapters_in_json_are_refused_by_name(module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = EngineConfig(lora_modules=(module,)).lora_paths
    assert caught.value.param == "lora_modules" and len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ("--override-generation-config {", "override_generation_config"),
        ("--override-generation-config [1]", "override_generation_config"),
        ('--override-generation-config {"temperature":-1}', "override_generation_config"),
        ('--override-generation-config {"top_k":"x"}', "override_generation_config"),
        ("--default-chat-template-kwargs 3", "default_chat_template_kwargs"),
        ('--default-chat-template-kwargs {"messages":[]}', "default_chat_template_kwargs"),
        ("--default-chat-template-kwargs " + "[" * 100_000, "default_chat_template_kwargs"),
    ],
)
def test_wrong_objects_are_refused_by_name(line: str, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        started(line)
    assert caught.value.param == param and len(caught.value.message) < 200


def test_parts_of_a_setting_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    name = "--default-chat-template-kwargs"
    config = started(f"--override-generation-config.top_k 5 {name}.a.b true {name}.c x")
    assert config.generation_overrides == {"top_k": 5}
    assert config.template_kwargs == {"a": {"b": True}, "c": "x"}
    assert "a has a value already" in fault(f"{name}.a 1 {name}.a.b 2", capsys)
    assert "expected one argument" in fault("--override-generation-config.top_k", capsys)


def test_a_token_of_the_hub_is_used_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[HubModel] = []

    def download(model: HubModel, **_: object) -> Path:
        asked.append(model)
        return tmp_path / "commit"

    monkeypatch.setattr(bundled, "download", download)
    config = parse_args(["org/model", "--tokenizer", "org/other", "--hf-token", "hf_secret"])
    assert "hf_secret" not in repr(config)
    assert bundled.pinned(config.engine).hf_token is None, "the engine and the logs do not get it"
    assert [(model.name, model.token) for model in asked] == [
        ("org/other", "hf_secret"),
        ("org/model", "hf_secret"),
    ]


def test_a_file_of_settings_takes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "quantization: awq\ntrust-remote-code: true\noverride-generation-config: {top_k: 5}\n"
        "speculative-config: {method: mtp, num_speculative_tokens: 2}\n",
        encoding="utf-8",
    )
    config = parse_args(["preset:toy", "--config", str(path)])
    assert config.generation_overrides == {"top_k": 5}
    assert (config.engine.quantization, config.engine.speculative_config) == (None, None)
    named = capsys.readouterr().err
    for flag in ("--quantization (awq)", "--trust-remote-code", "--speculative-config (mtp)"):
        assert flag in named
    assert json.loads(config.override_generation_config or "") == {"top_k": 5}
