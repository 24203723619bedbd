"""A first look at a server: its address, its models, and the forms of requests that it accepts."""

import asyncio
import dataclasses
import itertools
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from orca_jax.tools.bench.online.answers import CallOutcome, read_outcome
from orca_jax.tools.bench.online.exchange import Address, exchange
from orca_jax.tools.bench.online.key import KEY_VARIABLE
from orca_jax.tools.bench.online.prompts import RequestForm
from orca_jax.tools.bench.online.settings import OpenLoopSettings
from orca_jax.values.errors import ConfigError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LOOK_SECONDS = 10.0  # to connect, and to list the models
PROBE_WORDS = (32, 96)  # prompts of text; their difference gives the tokens per word
NAMES_SHOWN = 20
# another form may be accepted
_REFUSED = ("http_400", "http_422", "http_500", "http_501", "bad_stream")


@dataclass(frozen=True)
class RemoteTarget:
    """A server, ready for requests. `max_model_len` is None if the server does not report it."""

    address: Address
    form: RequestForm
    max_model_len: int | None


def look_at(settings: OpenLoopSettings) -> RemoteTarget:
    """Connect to the server and choose the form of requests.

    Raises:
        ConfigError: the server cannot be reached, refuses the key or all forms, or has no such model; `param` names
            the flag to change.
    """
    address = address_of(settings.base_url)
    model, max_model_len = _model(settings)
    form = asyncio.run(_form(settings, address, model))
    return RemoteTarget(address, form, max_model_len)


def _unreachable(url: str, reason: object) -> ConfigError:
    return ConfigError(
        f"base_url {url} is not reachable: {reason}; start the server first", param="base_url"
    )


def address_of(url: str) -> Address:
    """Resolve the host once, to the first address that accepts a connection. Raises ConfigError."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unreachable(url, error) from None
    problem: OSError | None = None
    for *_, place in found:
        try:
            socket.create_connection((str(place[0]), port), timeout=LOOK_SECONDS).close()
        except OSError as error:
            problem = error
        else:
            return Address(str(place[0]), port, tls, host if tls else None)
    raise _unreachable(url, problem)


def _model(settings: OpenLoopSettings) -> tuple[str, int | None]:
    """Return the name of the model, and its longest context if the server reports it."""
    headers = {} if settings.api_key is None else {"authorization": f"Bearer {settings.api_key}"}
    try:
        response = httpx.get(
            f"{settings.base_url}/v1/models", headers=headers, timeout=LOOK_SECONDS, trust_env=False
        )  # fmt: skip
    except httpx.TransportError as error:
        raise _unreachable(settings.base_url, str(error) or type(error).__name__) from None
    if response.status_code in (401, 403):
        raise _wrong_key(settings.base_url, response.status_code)
    try:
        lengths = {
            str(entry["id"]): _length(entry.get("max_model_len"))
            for entry in response.json()["data"]
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        lengths = {}
    names = ", ".join(itertools.islice(lengths, NAMES_SHOWN)) + (
        ", ..." if len(lengths) > NAMES_SHOWN else ""
    )
    if settings.model is None:
        if len(lengths) != 1:
            has = f"has {names}" if lengths else "does not list its models"
            raise ConfigError(f"model must be given: the server {has}", param="model")
        return next(iter(lengths.items()))
    if lengths and settings.model not in lengths:
        raise ConfigError(
            f"model {settings.model!r} is not served; the server has {names}", param="model"
        )
    return settings.model, lengths.get(settings.model)


def _length(value: object) -> int | None:
    """Return the reported context, unless it is missing or not a number."""
    if isinstance(value, int) and value > 1:
        return value
    return None


def _wrong_key(url: str, status: int) -> ConfigError:
    message = f"api_key is not accepted by {url}, which answered {status}; give --api-key or set {KEY_VARIABLE}"
    return ConfigError(message, param="api_key")


async def _form(settings: OpenLoopSettings, address: Address, model: str) -> RequestForm:
    """Return the first form that the server accepts, from the one with all fields to the plainest one."""
    is_chat = settings.endpoint == "chat"
    kinds = {"auto": [False] if is_chat else [True, False], "ids": [True], "text": [False]}[
        settings.prompts
    ]
    path = urlsplit(settings.base_url).path + PATHS[settings.endpoint]
    first: CallOutcome | None = None
    for uses_ids, has_usage, ignores_eos in itertools.product(kinds, (True, False), (True, False)):
        form = RequestForm(
            settings.base_url, path, model, is_chat, uses_ids, ignores_eos, has_usage,
            api_key=settings.api_key, extra=settings.extra_body,
        )  # fmt: skip
        outcome = await _probe(form, address, settings.timeout, [settings.vocab_size - 1] * 16)
        if not outcome.failure:
            if uses_ids:
                return form
            return await _measured(form, address, settings.timeout)
        first = first or outcome
        if outcome.failure not in _REFUSED:
            _explain(settings, outcome)
    assert first is not None
    _explain(settings, first)
    raise AssertionError("a failure is explained by an error")


def _explain(settings: OpenLoopSettings, outcome: CallOutcome) -> None:
    """Raise the error for the failure of a probe."""
    if outcome.failure in ("http_401", "http_403"):
        raise _wrong_key(settings.base_url, int(outcome.failure.removeprefix("http_")))
    if outcome.failure == "connect":
        raise _unreachable(settings.base_url, outcome.detail)
    reason = f"a first request to {PATHS[settings.endpoint]} failed ({outcome.failure}): {outcome.detail}"
    if outcome.failure in ("http_404", "http_405"):
        other = "chat" if settings.endpoint == "completions" else "completions"
        raise ConfigError(f"endpoint: {reason}; try --endpoint {other}", param="endpoint")
    if outcome.failure == "timeout":
        raise ConfigError(f"timeout: {reason}", param="timeout")
    raise ConfigError(f"base_url: {reason}", param="base_url")


async def _measured(form: RequestForm, address: Address, timeout: float) -> RequestForm:
    """Add the tokens of a word, by the server's own counts; unchanged if it sends none."""
    short, long = [
        (await _probe(form, address, timeout, range(words))).num_input for words in PROBE_WORDS
    ]
    if short is None or long is None or long <= short:
        return form
    per_word = (long - short) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return dataclasses.replace(
        form, tokens_per_word=per_word, overhead=short - per_word * PROBE_WORDS[0]
    )


async def _probe(
    form: RequestForm, address: Address, timeout: float, prompt_ids: Sequence[int]
) -> CallOutcome:
    """Send one short request, with these ids or as many words."""
    return read_outcome(
        await exchange(address, form.encode(prompt_ids, 2), time.monotonic(), timeout)
    )
