"""Settings of the open loop, read from flags and checked."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from urllib.parse import urlsplit

from orca_jax.flags.needs import check_needs
from orca_jax.tools.bench.online.key import read_key
from orca_jax.values.checks import json_value
from orca_jax.values.errors import ConfigError

LIMITS = ("ttft", "tpot", "e2el")
DEFAULT_REQUESTS = 64


@dataclass(frozen=True)
class OpenLoopSettings:
    """Settings of all passes; lengths are in tokens and times in seconds."""

    base_url: str  # without a final /v1
    model: str | None
    api_key: str | None
    endpoint: Literal["completions", "chat"]
    prompts: Literal["auto", "ids", "text"]
    trace: str
    trace_data: str | None
    length_scale: float
    max_model_len: int | None
    vocab_size: int
    rates: Sequence[float | None]  # None: the times of the file
    burstiness: float
    num_requests: int | None
    duration: float | None
    warmup_requests: int | None
    timeout: float
    seed: int
    goodput: Mapping[str, float]  # limits in milliseconds
    extra_body: Mapping[str, object]
    write_trace: str | None
    save: str | None
    plot: str | None


def read_settings(args: argparse.Namespace, files: Sequence[str]) -> OpenLoopSettings:
    """Check the flags of the open loop.

    Args:
        args: parsed flags.
        files: names of the traces that have arrival times.

    Raises:
        ConfigError: a value is wrong; `param` names the setting.
    """
    has_times = args.trace in files
    rates: Sequence[float | None] = args.request_rate or ([None] if has_times else [math.inf])
    for name, values in (
        ("request_rate", rates),
        ("burstiness", [args.burstiness]),
        ("duration", [args.duration]),
        ("timeout", [args.timeout]),
        ("num_requests", [args.num_requests]),
        ("vocab_size", [args.vocab_size]),
        ("max_model_len", [args.max_model_len]),
    ):
        if any(value is not None and not value > 0 for value in values):
            raise ConfigError(f"{name} must be above 0", param=name)
        if name in ("duration", "timeout") and math.inf in values:
            raise ConfigError(f"{name} must be finite", param=name)
    if args.warmup_requests is not None and args.warmup_requests < 0:
        raise ConfigError("warmup_requests must not be negative", param="warmup_requests")
    used = [name for name, value in vars(args).items() if value not in (None, 1)]
    check_needs(
        "bench online, open loop",
        SimpleNamespace(**vars(args), rates=rates, has_times=has_times),
        used,
    )
    given = vars(args) | {
        "base_url": check_url(args.base_url),
        "api_key": read_key(args.api_key),
        "rates": rates,
        "goodput": read_limits(args.goodput or ()),
        "extra_body": _extra(args.extra_body),
        **{name: _writable(getattr(args, name), name) for name in ("write_trace", "save", "plot")},
    }
    if args.num_requests is None and args.duration is None:
        given["num_requests"] = DEFAULT_REQUESTS
    return OpenLoopSettings(**{each.name: given[each.name] for each in fields(OpenLoopSettings)})


def check_url(url: str) -> str:
    """Return the URL without its final `/v1`. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        is_complete = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
        )
    except ValueError:
        is_complete = False
    if not is_complete or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"base_url {url!r} is not a URL such as http://localhost:8000", param="base_url"
        )
    return url.rstrip("/").removesuffix("/v1")


def read_limits(words: Sequence[str]) -> dict[str, float]:
    """Read limits such as `ttft:500`, in milliseconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        if name not in LIMITS:
            raise ConfigError(
                f"goodput has no limit {name!r}; limits are {', '.join(LIMITS)}", param="goodput"
            )
        if name in limits:
            raise ConfigError(f"goodput names {name} twice", param="goodput")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if not limits[name] >= 0:
            raise ConfigError(
                f"goodput {word!r} is not a limit in milliseconds such as {name}:500",
                param="goodput",
            )
    return limits


def _extra(text: str | None) -> dict[str, object]:
    try:
        value = json_value(text or "{}")
    except ValueError as error:
        raise ConfigError(f"extra_body is not valid JSON: {error}", param="extra_body") from None
    if not isinstance(value, dict):
        raise ConfigError(
            'extra_body is not a JSON object such as {"top_p": 0.9}', param="extra_body"
        )
    return value


def _writable(path: str | None, name: str) -> str | None:
    """Check the folder of an output before the run, so that no result is lost to a misspelt path."""
    if path is None:
        return None
    folder = Path(path).resolve().parent
    if not folder.is_dir() or Path(path).is_dir():
        place = path if Path(path).is_dir() else folder
        reason = (
            "is a directory; name a file"
            if Path(path).is_dir()
            else "is not a directory; make it first"
        )
        raise ConfigError(f"{name}: {place} {reason}", param=name)
    return path
