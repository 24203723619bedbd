"""Answers from an OpenAI-compatible server, with limited concurrency and with retries."""

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import msgspec

from orca_jax.batch.answers import Answer
from orca_jax.batch.rows import Row
from orca_jax.serve.openai.errors import ApiError
from orca_jax.values.checks import whole_number
from orca_jax.values.errors import UNREADABLE, ConfigError, EngineError, reason_of

PASSING = frozenset({408, 409, 429})  # and all from 500 on: a retry may succeed
FIRST_WAIT = 0.5  # seconds before the second attempt; doubled from there
LONGEST_WAIT = 60.0
CONNECT_SECONDS = 10.0


class RemoteServer:
    """Sends rows to a server.

    An error answer becomes an error row. If the server does not answer at all, after the last attempt, the run ends and
    can be resumed later. Exception: if it answered other rows in the meantime, only this row becomes an error row.

    Args:
        base_url: the server's address, with or without a final `/v1`.
        api_key: sent as a bearer token.
        concurrency: maximum number of connections.
        max_retries: attempts after the first one.
        timeout: seconds for one attempt.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        concurrency: int,
        max_retries: int,
        timeout: float,
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._max_retries = max_retries
        headers = {"content-type": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
        )
        self._last_answer = -1.0  # time of the last answer
        self._retries = 0
        self._wait_seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def answer(self, row: Row, row_id: str) -> Answer:
        """The answer of the server.

        Raises:
            ConfigError: the server refuses the key, and would refuse it for every row.
            EngineError: the server does not answer.
        """
        start = time.monotonic()
        for attempt in range(self._max_retries + 1):
            if attempt:
                self._retries += 1
            is_last = attempt == self._max_retries
            try:
                response = await self._http.post(self._base_url + row.url, content=row.body)
            except httpx.TransportError as error:
                if is_last:
                    return self._unanswered(row_id, error, start)
                await self._wait(attempt, None)
                continue
            self._last_answer = time.monotonic()
            if response.status_code == 401:
                detail = " ".join(response.text.split())[:200]
                message = f"must name a file with a valid key for {self._base_url}; the server answered 401: {detail}"
                raise ConfigError(message, param="api_key_file")
            if is_last or not _may_pass(response):
                return _answer(response)
            await self._wait(attempt, response.headers.get("retry-after"))
        raise AssertionError("the last attempt returns")

    def figures(self) -> Mapping[str, float]:
        """Number of retries, and the total time in seconds that rows waited for them."""
        return {"retries": self._retries, "retry_wait_s": self._wait_seconds}

    def _unanswered(self, row_id: str, error: httpx.TransportError, start: float) -> Answer:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self._last_answer < start:
            message = (
                f"{self._base_url} does not answer ({reason}); when it is back, run the same "
                "command again to resume"
            )
            raise EngineError(message) from error
        lost = ApiError(
            503,
            f"the server answered other rows, but not this one ({reason})",
            code="connection_lost",
        )
        return Answer(lost.status, row_id, lost.encode())

    async def _wait(self, attempt: int, retry_after: str | None) -> None:
        seconds = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.75, 1.25)
        wanted = whole_number(retry_after or "")
        if wanted is not None:
            seconds = min(LONGEST_WAIT, max(seconds, wanted))
        self._wait_seconds += seconds
        await asyncio.sleep(seconds)


def read_api_key(path: str | None) -> str | None:
    """Read the key from a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {reason_of(error)}", param="api_key_file"
        ) from None
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{path} must contain exactly one key of printable ASCII characters",
            param="api_key_file",
        )
    return key


def _may_pass(response: httpx.Response) -> bool:
    """True if a retry may succeed. A server can deny this by `x-should-retry`, as for OpenAI's client libraries."""
    if response.status_code < 500 and response.status_code not in PASSING:
        return False
    return response.headers.get("x-should-retry") != "false"


def _answer(response: httpx.Response) -> Answer:
    request_id = response.headers.get("x-request-id", "")
    try:
        body = msgspec.json.encode(
            msgspec.json.decode(response.content)
        )  # one line without line breaks, for the output
    except UNREADABLE:
        status = response.status_code if response.status_code >= 400 else 502
        text = response.text[:200]
        return Answer(
            status,
            request_id,
            ApiError(
                status, f"the server's answer is not valid JSON: {text!r}", code="no_json"
            ).encode(),
        )
    return Answer(response.status_code, request_id, body)
