"""Makes a `ServerConfig` of flags and of the `--config` file. One flag per field, spelt as in vLLM."""

import dataclasses
import math
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orca_jax.errors import ConfigError
from orca_jax.flags import (
    BRIEF,
    FlagParser,
    add_engine_args,
    add_field_args,
    engine_config_from_args,
    flag_of,
    program,
)
from orca_jax.request import MAX_LOGPROBS
from orca_jax.server_config import ServerConfig, endpoint_fault

DESCRIPTION = "Start an OpenAI-compatible HTTP server."
_MTLS = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")
_OF_HOSTS = ("node_rank", "master_addr", "master_port", "cluster_key_file", "control_timeout", *_MTLS)
_HOST_NAME = re.compile(r"[\w.-]*\w\.?", re.ASCII)
MIN_HEARTBEAT_TIMEOUT = 1.0  # seconds; the engine sends two heartbeats per second

_FIELDS = [field for field in dataclasses.fields(ServerConfig) if field.name != "engine"]


def parse_args(argv: Sequence[str] | None = None) -> ServerConfig:
    """Read the flags and the file of `--config`. For a wrong flag argparse ends the process with code 2.

    Raises:
        ConfigError: the file, a value, or a combination of values is wrong; `param` names the flag.
    """
    return read_flags(make_parser(), argv)[0]


def read_flags(parser: FlagParser, argv: Sequence[str] | None) -> tuple[ServerConfig, Namespace]:
    """Read the flags of a parser of `make_parser` and the file of `--config`, for a program with more flags.

    Raises:
        ConfigError: as `parse_args`.
    """
    args, given = parser.parse_args(argv), parser.given(argv)
    values = {field.name: getattr(args, field.name) for field in _FIELDS}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    config = ServerConfig(engine=engine_config_from_args(args), **values)
    check(config)
    for name in {"host", "port"} & given if config.uds is not None else ():
        _require(False, name, "cannot be combined with --uds; use one of them")
    for name in () if "nnodes" in given else sorted(given.intersection(_OF_HOSTS)):
        _require(False, name, "needs --nnodes")
    return config, args


def check(config: ServerConfig) -> None:
    """Check values and their combinations. Raises ConfigError; its `param` names the flag."""
    for name in ("host", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "chat_template", "generation_config"):
        _require(getattr(config, name) != "", name, "must not be empty")
    for name in ("served_model_name", "api_key", "allowed_origins", "allowed_hosts"):
        _require(all(getattr(config, name)), name, "must not be empty")
    _check_address(config)
    _check_numbers(config)
    if config.allow_credentials and (not config.allowed_origins or "*" in config.allowed_origins):
        _require(False, "allow_credentials", "needs --allowed-origins with origins other than '*'")
    has_keys = bool(config.api_key) or config.api_key_file is not None
    _require(has_keys or not config.cache_salt_per_key, "cache_salt_per_key", "needs --api-key-file or --api-key")
    for name, needed in (("admin_key_file", "weights_root"), ("weights_root", "admin_key_file")):
        _require(getattr(config, name) is None or getattr(config, needed), name, f"needs {flag_of(needed)}")
    _check_kv_events(config)
    _check_adapters(config)
    endpoint = config.otlp_traces_endpoint
    _check_hosts(config)
    is_url = endpoint is None or endpoint.startswith(("http://", "https://"))
    _require(is_url, "otlp_traces_endpoint", "must begin with http:// or https://")


def _check_address(config: ServerConfig) -> None:
    _require(0 <= config.port <= 65535, "port", f"must be in 0..65535, got {config.port}")
    if config.uds is not None:
        for name in ("host", "port"):
            is_default = getattr(config, name) == _default(name)
            _require(is_default, name, "cannot be combined with --uds; use one of them")
        _require(not config.allowed_hosts, "allowed_hosts", "has no effect with --uds, where no name is checked")
    for name in config.allowed_hosts:
        holds = _HOST_NAME.fullmatch(name) is not None
        _require(holds, "allowed_hosts", f"must be names such as llm.example, without scheme and port; got {name!r}")
    has_key, has_certificate = config.ssl_keyfile is not None, config.ssl_certfile is not None
    _require(has_certificate or not has_key, "ssl_certfile", "is missing; --ssl-keyfile needs its certificate")
    _require(
        has_key or not has_certificate,
        "ssl_keyfile",
        "is missing; --ssl-certfile needs its private key",
    )
    needs_tls = config.ssl_ca_certs is not None and not has_certificate
    _require(not needs_tls, "ssl_ca_certs", "needs --ssl-certfile and --ssl-keyfile")
    root = config.root_path
    holds = not root or (root.startswith("/") and not root.endswith("/") and root.isascii() and root.isprintable())
    _require(holds, "root_path", "must begin with a slash and must not end with one, such as /llm")


def _check_hosts(config: ServerConfig) -> None:
    nnodes, rank = config.nnodes, config.node_rank
    _require(nnodes >= 1, "nnodes", f"must be at least 1, got {nnodes}")
    _require(0 <= rank < nnodes, "node_rank", f"must be in 0..{nnodes - 1} with --nnodes {nnodes}, got {rank}")
    what = "needs --nnodes 1: the other processes have ended with the engine, and their owner must start all of them"
    _require(nnodes == 1 or not config.restart_engine, "restart_engine", what)
    _require(config.master_addr != "", "master_addr", "must not be empty")
    _require(
        1 <= config.master_port <= 65533,
        "master_port",
        f"must be in 1..65533, since the next two ports are used too; got {config.master_port}",
    )
    missing = [name for name in _MTLS if getattr(config, name) is None]
    if missing and len(missing) < len(_MTLS):
        _require(False, missing[0], "is missing; mutual TLS needs three files")
    timeout = config.control_timeout
    holds = math.isfinite(timeout) and timeout >= MIN_HEARTBEAT_TIMEOUT
    _require(holds, "control_timeout", f"must be at least {MIN_HEARTBEAT_TIMEOUT:g} s, got {timeout}")


def _check_numbers(config: ServerConfig) -> None:
    for name in ("queue_timeout", "request_timeout", "read_timeout", "write_timeout", "step_timeout", "load_timeout"):
        value = getattr(config, name)
        holds = value is None or (math.isfinite(value) and value > 0)
        _require(holds, name, f"must be a positive number of seconds, got {value}")
    holds = math.isfinite(config.shutdown_timeout) and config.shutdown_timeout >= 0
    _require(holds, "shutdown_timeout", f"must be a number of seconds of at least 0, got {config.shutdown_timeout}")
    holds = math.isfinite(config.heartbeat_timeout) and config.heartbeat_timeout >= MIN_HEARTBEAT_TIMEOUT
    _require(
        holds, "heartbeat_timeout", f"must be at least {MIN_HEARTBEAT_TIMEOUT:g} s, got {config.heartbeat_timeout}"
    )
    for name, least in (
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", 1),
        ("max_body_bytes", 1),
        ("responses_store", 0),
    ):
        value = getattr(config, name)
        _require(value >= least, name, f"must be at least {least}, got {value}")
    most = config.max_calls_per_key
    _require(most is None or most >= 1, "max_calls_per_key", f"must be at least 1, got {most}")
    holds = 0 <= config.max_logprobs <= MAX_LOGPROBS
    _require(holds, "max_logprobs", f"must be in 0..{MAX_LOGPROBS}, got {config.max_logprobs}")


def _check_kv_events(config: ServerConfig) -> None:
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is not None:
            fault = endpoint_fault(endpoint, allows_remote=config.kv_events_allow_remote)
            _require(fault is None, name, fault or "")
    for name in ("kv_events_replay_endpoint", "kv_events_topic", "kv_events_allow_remote"):
        _require(config.kv_events_endpoint is not None or not getattr(config, name), name, "needs --kv-events-endpoint")


def _check_adapters(config: ServerConfig) -> None:
    folder = config.lora_dir
    if folder is not None:
        _require(config.engine.enable_lora, "lora_dir", "needs --enable-lora")
        _require(Path(folder).is_dir(), "lora_dir", f"{folder} is not a directory")
    for name in config.engine.lora_paths:
        is_taken = name in config.names
        _require(not is_taken, "lora_modules", f"{name} is the name of the model; choose another one")


def _require(holds: bool, param: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, param=param)


def _default(name: str) -> Any:
    return next(field.default for field in _FIELDS if field.name == name)


def make_parser(name: str | None = None, description: str = DESCRIPTION) -> FlagParser:
    """Return a parser with all flags of the server for the program `name`, for `read_flags`."""
    name = name or program("serve")
    parser = FlagParser(name, f"{name} [flags]", brief=BRIEF, description=description)
    add_engine_args(parser)
    add_field_args(parser, ServerConfig, _FIELDS)
    return parser
