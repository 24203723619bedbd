"""Flags of the server, and the file of `--config`."""

import dataclasses
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orca_jax.batch.config import BatchConfig
from orca_jax.flags import help_of
from orca_jax.flags import texts as help_texts
from orca_jax.serve.__main__ import main
from orca_jax.serve.args import parse_args
from orca_jax.server_config import KvEvents, ServerConfig
from orca_jax.tools.deploy.ray_serve import RayConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError


def test_texts_belong_to_fields() -> None:
    """A flag that was renamed or removed would leave its text behind."""
    kinds = {kind.__name__: kind for kind in (EngineConfig, ServerConfig, BatchConfig, RayConfig)}
    texts = tomllib.loads(
        Path(help_texts.__file__).with_suffix(".toml").read_text(encoding="utf-8")
    )
    assert texts.keys() == kinds.keys()
    for name, fields in texts.items():
        assert fields.keys() <= {field.name for field in dataclasses.fields(kinds[name])}


def test_every_field_has_a_flag_and_the_same_default() -> None:
    assert parse_args([]) == ServerConfig()


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help=all"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ServerConfig):
        if field.name != "engine":
            assert (
                f"--{field.name.replace('_', '-')}" in shown
                and help_of(field.name, ServerConfig) in shown
            )


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ("--help", {"--model", "--port", "--config", "--help"}, {"--page-size", "--ssl-keyfile"}),
        ("--help=access", {"--api-key", "--api-key-file"}, {"--model", "--port"}),
        ("--help=ssl", {"--ssl-keyfile", "--ssl-certfile"}, {"--model", "--api-key"}),
        ("--help=max_num", {"--max-num-seqs", "--max-num-batched-tokens"}, {"--port"}),
    ],
)
def test_help_of_some_flags(
    word: str, shown: set[str], hidden: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args([word])
    assert caught.value.code == 0
    flags = {
        line.strip(" ,").split(" ")[0].rstrip(",") for line in capsys.readouterr().out.splitlines()
    }
    flags |= {"--help"} if "-h" in flags else set()
    assert shown <= flags and not hidden & flags


def test_help_of_an_unknown_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help=xyz"])
    assert caught.value.code == 2
    assert "no flag and no group has the word 'xyz'; groups: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--served-model-name a b", {"served_model_name": ("a", "b")}),
        ("--api-key one two --port 0", {"api_key": ("one", "two"), "port": 0}),
        ("--api-key=-dash", {"api_key": ("-dash",)}),
        (
            "--max-num-queued-reqs 4k --max-body-bytes 1M",
            {"max_num_queued_reqs": 4000, "max_body_bytes": 2**20},
        ),
        ("--overload-status 429", {"overload_status": 429}),
        (
            "--queue-timeout 1.5 --shutdown-timeout 0",
            {"queue_timeout": 1.5, "shutdown_timeout": 0.0},
        ),
        ("--restart-engine --no-log-requests", {"restart_engine": True, "log_requests": False}),
        ("--uds some.sock --root-path /llm", {"uds": "some.sock", "root_path": "/llm"}),
        (
            "--tool-call-parser hermes --log-format json",
            {"tool_call_parser": "hermes", "log_format": "json"},
        ),
        ("--model preset:toy", {"engine": EngineConfig(model="preset:toy")}),
    ],
)
def test_flags(flags: str, expected: dict[str, Any]) -> None:
    assert parse_args(flags.split()) == ServerConfig(**expected)


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ("--port 70000", "port"),
        ("--port -1", "port"),
        ("--uds x --port 81", "port"),
        ("--uds x --host ::1", "host"),
        ("--uds=", "uds"),
        ("--ssl-certfile x", "ssl_certfile"),
        ("--ssl-keyfile x", "ssl_keyfile"),
        ("--ssl-ca-certs x", "ssl_ca_certs"),
        ("--root-path llm", "root_path"),
        ("--root-path /llm/", "root_path"),
        ("--queue-timeout 0", "queue_timeout"),
        ("--request-timeout -1", "request_timeout"),
        ("--read-timeout nan", "read_timeout"),
        ("--write-timeout inf", "write_timeout"),
        ("--shutdown-timeout -0.1", "shutdown_timeout"),
        ("--heartbeat-timeout 0.5", "heartbeat_timeout"),
        ("--step-timeout 0", "step_timeout"),
        ("--load-timeout -3", "load_timeout"),
        ("--max-num-queued-reqs -1", "max_num_queued_reqs"),
        ("--max-num-queued-tokens 0", "max_num_queued_tokens"),
        ("--max-body-bytes 0", "max_body_bytes"),
        ("--max-calls-per-key 0", "max_calls_per_key"),
        ("--allowed-hosts=", "allowed_hosts"),
        ("--max-logprobs 21", "max_logprobs"),
        ("--allowed-origins page.example", "allowed_origins"),
        ("--allowed-origins https://page.example/", "allowed_origins"),
        ("--allow-credentials", "allow_credentials"),
        ("--allow-credentials --allowed-origins *", "allow_credentials"),
        ("--allow-credentials --allowed-origins http://a *", "allow_credentials"),
        ("--api-key a --api-key=", "api_key"),
        ("--cache-salt-per-key", "cache_salt_per_key"),
        ("--served-model-name=", "served_model_name"),
        ("--otlp-traces-endpoint localhost:4318", "otlp_traces_endpoint"),
        ("--kv-events-endpoint tcp://*:5557", "kv_events_endpoint"),
        ("--kv-events-endpoint tcp://10.0.0.1:5557", "kv_events_endpoint"),
        ("--kv-events-endpoint 127.0.0.1:5557", "kv_events_endpoint"),
        ("--kv-events-endpoint tcp://127.0.0.1", "kv_events_endpoint"),
        ("--kv-events-endpoint tcp://127.0.0.1:" + "9" * 5000, "kv_events_endpoint"),
        (
            "--kv-events-endpoint ipc://a --kv-events-replay-endpoint tcp://[::]:1",
            "kv_events_replay_endpoint",
        ),
        ("--kv-events-replay-endpoint ipc://a", "kv_events_replay_endpoint"),
        ("--kv-events-topic t", "kv_events_topic"),
        ("--kv-events-allow-remote", "kv_events_allow_remote"),
        ("--config missing.yaml", "config"),
        ("--nnodes 0", "nnodes"),
        ("--node-rank 1", "node_rank"),
        ("--nnodes 2 --node-rank 2", "node_rank"),
        ("--master-addr 10.0.0.1", "master_addr"),
        ("--cluster-key-file x", "cluster_key_file"),
        ("--nnodes 2 --restart-engine", "restart_engine"),
        ("--restart-workers", "restart_workers"),
        ("--nnodes 2 --master-port 65534", "master_port"),
        ("--nnodes 2 --control-timeout 0.5", "control_timeout"),
        ("--nnodes 2 --mtls-cert-file x --mtls-key-file x", "mtls_cert_file"),
    ],
)
def test_what_cannot_be_meant(flags: str, param: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(flags.split())
    assert caught.value.param == param
    assert main(flags.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: --{param.replace('_', '-')}: ")


@pytest.mark.parametrize(
    "flags", ["--overload-status 500", "--log-format xml", "--port x", "--unknown", "--api-key"]
)
def test_what_argparse_refuses(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(flags.split())
    assert caught.value.code == 2 and flags.split()[0] in capsys.readouterr().err


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_holds_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        """
        model: preset:toy
        max-num-seqs: 4k
        max_num_queued_reqs: 7
        api-key: [-a, ]
        served_model_name: [x, y]
        queue-timeout: 2
        restart-engine: true
        log-requests: false
        block-size: 32
        uds: null
        port: 81
        """,
    )
    config = parse_args(
        [
            "--config",
            name,
            "--max-num-queued-reqs",
            "8",
            "--served-model-name",
            "z",
            "--log-requests",
        ]
    )
    engine = EngineConfig(model="preset:toy", max_num_seqs=4000, page_size=32)
    assert config == ServerConfig(
        engine=engine,
        max_num_queued_reqs=8,
        api_key=("-a",),
        served_model_name=("z",),
        queue_timeout=2.0,
        restart_engine=True,
        port=81,
    )
    assert parse_args([f"--config={write(tmp_path, '')}"]) == ServerConfig()


def test_values_of_a_file_are_checked_as_flags_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be in 0\.\.65535") as caught:
        parse_args(["--config", write(tmp_path, "port: 70000")])
    assert caught.value.param == "port"


def test_a_value_of_a_file_counts_as_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with --uds"):
        parse_args(["--config", write(tmp_path, "port: 8000"), "--uds", "x"])
    assert parse_args(["--config", write(tmp_path, "port: null"), "--uds", "x"]).uds == "x"


@pytest.mark.parametrize(
    "endpoint", ["ipc:///run/events", "tcp://127.0.0.1:5557", "tcp://[::1]:1", "tcp://localhost:1"]
)
def test_events_stay_on_the_machine(endpoint: str) -> None:
    events = parse_args(["--kv-events-endpoint", endpoint, "--served-model-name", "m"]).kv_events
    assert events == KvEvents(endpoint, f"kv@{socket.gethostname()}@m")


def test_events_for_other_machines_are_allowed_by_name() -> None:
    flags = [
        "--kv-events-endpoint",
        "tcp://*:5557",
        "--kv-events-allow-remote",
        "--kv-events-topic",
        "kv@a@b",
    ]
    assert parse_args(flags).kv_events == KvEvents("tcp://*:5557", "kv@a@b")
    assert ServerConfig().kv_events is None


def test_speculation_is_json_or_a_mapping(tmp_path: Path) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    in_file = write(tmp_path, "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    for argv in (["--speculative-config", text], ["--config", in_file]):
        speculative = parse_args(argv).engine.speculative_config
        assert speculative is not None and speculative.num_speculative_tokens == 3
    with pytest.raises(
        ConfigError, match="speculative_config: num_speculative_tokens must be an integer from 1"
    ):
        parse_args(["--speculative-config", "{}"])
