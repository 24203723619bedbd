"""Checks of the settings of a batch run and of their combinations."""

import json
import math
from collections.abc import Collection

import httpx

from orca_jax.batch.config import MAX_CONCURRENCY, BatchConfig
from orca_jax.batch.rows import COMPLETIONS
from orca_jax.flags.needs import changed, check_needs
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema import completion_parser
from orca_jax.values.checks import require
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import MAX_LOGPROBS


def check(config: BatchConfig, given: Collection[str] = ()) -> None:
    """Check the settings and their combinations. Raises ConfigError; `param` names the flag.

    Args:
        given: settings that count as set although they may have their default values.
    """
    window = config.concurrency
    holds = window is None or 1 <= window <= MAX_CONCURRENCY
    require(holds, "concurrency", f"must be in 1..{MAX_CONCURRENCY}, got {window}")
    require(config.max_retries >= 0, "max_retries", f"must be at least 0, got {config.max_retries}")
    holds = math.isfinite(config.request_timeout) and config.request_timeout > 0
    require(
        holds,
        "request_timeout",
        f"must be a number of seconds above 0, got {config.request_timeout}",
    )
    holds = 0 <= config.server.max_logprobs <= MAX_LOGPROBS
    require(
        holds, "max_logprobs", f"must be in 0..{MAX_LOGPROBS}, got {config.server.max_logprobs}"
    )
    is_url = config.base_url is None or _is_base_url(config.base_url)
    require(is_url, "base_url", "must be a URL such as http://localhost:8000")
    _check_body(config)
    check_needs(
        "batch",
        config,
        changed(config, config.server, config.server.engine).union(given, ("output",)),
    )


def _check_body(config: BatchConfig) -> None:
    """Check the fields for prompts, as far as possible without the model."""
    try:
        fields = json.loads(config.body)
    except (ValueError, RecursionError):
        fields = None
    example = '{"max_tokens": 64, "temperature": 0}'
    require(isinstance(fields, dict), "body", f"must be a JSON object such as '{example}'")
    require("prompt" not in fields, "body", "must not contain a prompt: prompts come from --input")
    if config.base_url is not None:
        return  # another server may support other fields
    try:
        body = json.dumps({"model": config.model, **fields, "prompt": ""}).encode()
        completion_parser.parse(body, ignores_unknown=config.server.unknown_fields == "ignore")
    except ApiError as error:
        raise ConfigError(
            f"is not a valid body of {COMPLETIONS}: {error.message}", param="body"
        ) from None


def _is_base_url(text: str) -> bool:
    """True if the text is a URL to which a path can be added."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and url.host != "" and not url.query and not url.fragment
