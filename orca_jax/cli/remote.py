"""A model behind an OpenAI-compatible server."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from orca_jax.values.errors import ConfigError, EngineError, RequestError, reason_of

_DONE = "[DONE]"
_CONNECT_SECONDS = 5.0


class RemoteModel:
    """The model of a server.

    Args:
        base_url: the address of the server, with or without `/v1`.
        name: the name of the model; None for the first one of the server.
        key_file: file with the API key; None: no key.
        sampling: fields of each call; the server applies the defaults of its model to the others.

    Raises:
        ConfigError: the URL or the file is wrong.
        EngineError: the server does not answer.
    """

    def __init__(
        self, base_url: str, name: str | None, key_file: str | None, sampling: Mapping[str, Any]
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"must begin with http:// or https://, got {base_url!r}", param="base_url"
            )
        headers = {} if key_file is None else {"authorization": f"Bearer {_read_key(key_file)}"}
        self._sampling = sampling
        self._base = base_url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, timeout=timeout)
        self.name = name or self._first_model()

    def continuation(self, prompt: str) -> Iterator[str]:
        """Stream the text after a prompt."""
        for choice in self._stream("completions", {"prompt": prompt}):
            yield choice.get("text") or ""

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Stream the answer to a conversation."""
        for choice in self._stream("chat/completions", {"messages": list(messages)}):
            yield choice.get("delta", {}).get("content") or ""

    def _stream(self, route: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {"model": self.name, "stream": True, **fields, **self._sampling}
        try:
            with self._http.stream("POST", f"{self._base}/v1/{route}", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, response.read())
                for event in _events(response):
                    yield from event.get("choices", ())
        except httpx.HTTPError as error:
            raise EngineError(f"{self._base} does not answer: {error}") from None

    def explanations(self) -> list[dict[str, Any]]:
        """Why tokens of the last prompts were computed again, the newest one first."""
        found: list[dict[str, Any]] = self._get("cache_explanations").json()["data"]
        return found

    def _get(self, route: str) -> httpx.Response:
        try:
            response = self._http.get(f"{self._base}/v1/{route}", timeout=_CONNECT_SECONDS)
        except httpx.HTTPError as error:
            raise EngineError(
                f"{self._base} does not answer: {error}; is the server running?"
            ) from None
        if response.status_code != 200:
            raise _refusal(response.status_code, response.content)
        return response

    def _first_model(self) -> str:
        response = self._get("models")
        try:
            name: str = response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise EngineError(
                f"{self._base}/v1/models lists no models; name one with --model"
            ) from None
        return name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises EngineError: one of them is an error."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == _DONE:
            continue
        event = json.loads(data)
        if "error" in event:
            raise EngineError(_message(event))
        yield event


def _refusal(status: int, content: bytes) -> RequestError | EngineError:
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = content[:200].decode(errors="replace")
    text = f"the server answered {status}: {message}"
    if status >= 500 or status == 429:
        return EngineError(text)
    if b'"no_chat_template"' in content:
        return RequestError(text, param="chat_template")
    return RequestError(text)


def _message(answer: Any) -> str:
    match answer:
        case {"error": dict(error)}:
            return str(error.get("message"))
    return str(answer)


def _read_key(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not valid UTF-8; give another file"
        if isinstance(error, OSError):
            reason = reason_of(error)
        raise ConfigError(f"{path} cannot be read: {reason}", param="api_key_file") from None
    if not key or len(key.split()) > 1:
        raise ConfigError(f"{path} must hold one API key", param="api_key_file")
    return key
