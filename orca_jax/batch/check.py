"""Checks of the settings of a batch run and of their combinations."""

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx

from orca_jax.batch.config import MAX_CONCURRENCY, BatchConfig, model_names
from orca_jax.batch.output import old_path
from orca_jax.batch.rows import COMPLETIONS
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema import completion_parser
from orca_jax.request import MAX_LOGPROBS

_OF_REMOTE = ("api_key_file", "max_retries", "request_timeout")


def check(config: BatchConfig) -> None:
    """Check the settings. Raises ConfigError; `param` names the flag."""
    window = config.concurrency
    holds = window is None or 1 <= window <= MAX_CONCURRENCY
    _require(holds, "concurrency", f"must be in 1..{MAX_CONCURRENCY}, got {window}")
    _require(config.max_retries >= 0, "max_retries", f"must be at least 0, got {config.max_retries}")
    holds = math.isfinite(config.request_timeout) and config.request_timeout > 0
    _require(holds, "request_timeout", f"must be a number of seconds above 0, got {config.request_timeout}")
    holds = 0 <= config.server.max_logprobs <= MAX_LOGPROBS
    _require(holds, "max_logprobs", f"must be in 0..{MAX_LOGPROBS}, got {config.server.max_logprobs}")
    _check_files(config)
    _check_body(config)
    check_place(config)


def _check_files(config: BatchConfig) -> None:
    """Refuse to write to a file that the run reads or writes already."""
    _require(
        not _is_same(config.output, config.input), "output", "is the same file as --input; choose another output file"
    )
    is_moved = config.overwrite and _is_same(old_path(config.output), config.input)
    _require(not is_moved, "output", "would be renamed to --input by --overwrite; choose another output file")
    if config.server.engine.trace_file is not None:
        timeline = Path(config.server.engine.trace_file)
        for name, path in (("input", config.input), ("output", config.output)):
            message = f"is the same file as --{name}; choose another file for the timeline"
            _require(not _is_same(timeline, path), "trace_file", message)


def _is_same(one: Path, other: Path) -> bool:
    return one.absolute() == other.absolute() or (one.exists() and other.exists() and one.samefile(other))


def _check_body(config: BatchConfig) -> None:
    """Check the fields for prompts, as far as possible without the model."""
    try:
        fields = json.loads(config.body)
    except (ValueError, RecursionError):
        fields = None
    example = '{"max_tokens": 64, "temperature": 0}'
    _require(isinstance(fields, dict), "body", f"must be a JSON object such as '{example}'")
    _require("prompt" not in fields, "body", "must not contain a prompt: prompts come from --input")
    if config.base_url is not None:
        return  # another server may support other fields
    try:
        body = json.dumps({"model": config.model, **fields, "prompt": ""}).encode()
        completion_parser.parse(body, ignores_unknown=config.server.unknown_fields == "ignore")
    except ApiError as error:
        raise ConfigError(f"is not a valid body of {COMPLETIONS}: {error.message}", param="body") from None


def check_place(config: BatchConfig, given: Collection[str] = ()) -> None:
    """Refuse settings of an engine together with --base-url, and settings of a server without it.

    Args:
        given: settings that count as set although they may have their default values.
    """

    def is_set(owner: object, name: str) -> bool:
        return name in given or not _is_default(owner, name)

    if config.base_url is None:
        for name in _OF_REMOTE:
            _require(not is_set(config, name), name, "is only for a server; it requires --base-url")
        return
    _require(_is_base_url(config.base_url), "base_url", "must be a URL such as http://localhost:8000")
    for name in model_names():
        holds = name == "served_model_name" or not is_set(config.server, name)
        _require(holds, name, "is only for an engine in this process; leave it out with --base-url")
    for one in dataclasses.fields(EngineConfig):
        if one.name not in ("model", "progress"):
            holds = not is_set(config.server.engine, one.name)
            _require(holds, one.name, "is only for an engine in this process; leave it out with --base-url")
    names = config.server.served_model_name
    _require(len(names) <= 1, "served_model_name", "must be one name with --base-url: that of prompts without a model")
    has_two = bool(names) and is_set(config.server.engine, "model")
    _require(not has_two, "model", "has no effect beside --served-model-name with --base-url; leave one of them out")


def _is_base_url(text: str) -> bool:
    """True if the text is a URL to which a path can be added."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and url.host != "" and not url.query and not url.fragment


def _is_default(config: Any, name: str) -> bool:
    return any(one.name == name and getattr(config, name) == one.default for one in dataclasses.fields(config))


def _require(holds: bool, param: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, param=param)
