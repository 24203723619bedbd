"""Makes a `ServerConfig` of flags and of the `--config` file. One flag per field, spelt as in vLLM."""

import dataclasses
import math
import re
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path

from orca_jax.flags import (
    BRIEF,
    FlagParser,
    add_engine_args,
    add_field_args,
    engine_config_from_args,
    program,
)
from orca_jax.flags.needs import changed, check_needs
from orca_jax.server_config import ServerConfig, endpoint_fault
from orca_jax.values.checks import json_value, require, short
from orca_jax.values.request import MAX_LOGPROBS

DESCRIPTION = "Start an OpenAI-compatible HTTP server."
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
    args = parser.parse_args(argv)
    given = parser.given(argv)
    values = {field.name: getattr(args, field.name) for field in _FIELDS}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    values["allowed_origins"] = _origins(values["allowed_origins"])
    config = ServerConfig(engine=engine_config_from_args(args), **values)
    check(config, given)
    if "nnodes" not in given:
        check_needs("serve without --nnodes", config, given)
    return config, args


def _origins(words: tuple[str, ...]) -> tuple[str, ...]:
    """The origins of a list of words, or of one word with a list in JSON, as in vLLM."""
    if len(words) != 1 or not words[0].startswith("["):
        return words
    try:
        found = json_value(words[0])
    except ValueError:
        found = None
    holds = isinstance(found, list) and all(isinstance(origin, str) for origin in found)
    require(
        holds,
        "allowed_origins",
        f"must be origins, or a list of them in JSON; got {short(words[0])}",
    )
    return tuple(found)


def check(config: ServerConfig, given: Collection[str] = ()) -> None:
    """Check values and their combinations. Raises ConfigError; its `param` names the flag.

    Args:
        given: flags that count as set although they may have their default values.
    """
    for name in (
        "host",
        "uds",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        "chat_template",
        "calibration",
        "generation_config",
    ):
        require(getattr(config, name) != "", name, "must not be empty")
    for name in ("served_model_name", "api_key", "allowed_origins", "allowed_hosts"):
        require(all(getattr(config, name)), name, "must not be empty")
    for origin in config.allowed_origins:
        is_origin = (
            origin in ("*", "null")
            or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) is not None
        )
        require(
            is_origin,
            "allowed_origins",
            f"must be *, or origins such as https://page.example; got {short(origin)}",
        )
    _check_address(config)
    _check_defaults(config)
    _check_numbers(config)
    _check_kv_events(config)
    folder = config.lora_dir
    require(folder is None or Path(folder).is_dir(), "lora_dir", f"{folder} is not a directory")
    endpoint = config.otlp_traces_endpoint
    _check_hosts(config)
    is_url = endpoint is None or endpoint.startswith(("http://", "https://"))
    require(is_url, "otlp_traces_endpoint", "must begin with http:// or https://")
    check_needs("serve", config, changed(config, config.engine).union(given))


def _check_address(config: ServerConfig) -> None:
    require(0 <= config.port <= 65535, "port", f"must be in 0..65535, got {config.port}")
    for name in config.allowed_hosts:
        holds = _HOST_NAME.fullmatch(name) is not None
        require(
            holds,
            "allowed_hosts",
            f"must be names such as llm.example, without scheme and port; got {name!r}",
        )
    root = config.root_path
    holds = not root or (
        root.startswith("/") and not root.endswith("/") and root.isascii() and root.isprintable()
    )
    require(holds, "root_path", "must begin with a slash and must not end with one, such as /llm")


def _check_defaults(config: ServerConfig) -> None:
    if not config.template_kwargs and not config.generation_overrides:
        return
    # most servers start sooner without it
    from orca_jax.text.generation_config import read_generation_defaults
    from orca_jax.text.template import RESERVED

    reserved = sorted(RESERVED & config.template_kwargs.keys())
    name = "default_chat_template_kwargs"
    require(
        not reserved, name, f"must not hold {', '.join(reserved)}, which each request has itself"
    )
    read_generation_defaults("", "none", config.generation_overrides)  # checks them


def _check_hosts(config: ServerConfig) -> None:
    require(config.nnodes >= 1, "nnodes", f"must be at least 1, got {config.nnodes}")
    require(config.master_addr != "", "master_addr", "must not be empty")
    require(
        1 <= config.master_port <= 65533,
        "master_port",
        f"must be in 1..65533, since the next two ports are used too; got {config.master_port}",
    )
    timeout = config.control_timeout
    holds = math.isfinite(timeout) and timeout >= MIN_HEARTBEAT_TIMEOUT
    require(
        holds, "control_timeout", f"must be at least {MIN_HEARTBEAT_TIMEOUT:g} s, got {timeout}"
    )


def _check_numbers(config: ServerConfig) -> None:
    for name in (
        "queue_timeout",
        "request_timeout",
        "read_timeout",
        "write_timeout",
        "step_timeout",
        "load_timeout",
    ):
        value = getattr(config, name)
        holds = value is None or (math.isfinite(value) and value > 0)
        require(holds, name, f"must be a positive number of seconds, got {value}")
    holds = math.isfinite(config.shutdown_timeout) and config.shutdown_timeout >= 0
    require(
        holds,
        "shutdown_timeout",
        f"must be a number of seconds of at least 0, got {config.shutdown_timeout}",
    )
    holds = (
        math.isfinite(config.heartbeat_timeout)
        and config.heartbeat_timeout >= MIN_HEARTBEAT_TIMEOUT
    )
    require(
        holds,
        "heartbeat_timeout",
        f"must be at least {MIN_HEARTBEAT_TIMEOUT:g} s, got {config.heartbeat_timeout}",
    )
    for name, least in (
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", 1),
        ("max_body_bytes", 1),
        ("responses_store", 0),
    ):
        value = getattr(config, name)
        require(value >= least, name, f"must be at least {least}, got {value}")
    most = config.max_calls_per_key
    require(most is None or most >= 1, "max_calls_per_key", f"must be at least 1, got {most}")
    holds = 0 <= config.max_logprobs <= MAX_LOGPROBS
    require(holds, "max_logprobs", f"must be in 0..{MAX_LOGPROBS}, got {config.max_logprobs}")


def _check_kv_events(config: ServerConfig) -> None:
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is not None:
            fault = endpoint_fault(endpoint, allows_remote=config.kv_events_allow_remote)
            require(fault is None, name, fault or "")


def make_parser(name: str | None = None, description: str = DESCRIPTION) -> FlagParser:
    """Return a parser with all flags of the server for the program `name`, for `read_flags`."""
    name = name or program("serve")
    parser = FlagParser(name, f"{name} [MODEL] [flags]", brief=BRIEF, description=description)
    add_engine_args(parser, has_word=True)
    add_field_args(parser, ServerConfig, _FIELDS)
    return parser
