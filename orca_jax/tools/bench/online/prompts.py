"""Bodies of requests, with prompts as token ids or as text of about the same length."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import h11

_VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city"
)
WORDS = tuple(_VOCABULARY.split())


@dataclass(frozen=True)
class RequestForm:
    """The form of requests to one server.

    A prompt of n tokens is sent as text of (n - overhead) / tokens_per_word words; `overhead` is the number of tokens
    that the server's template adds.
    """

    url: str
    path: str
    model: str
    is_chat: bool = False
    uses_ids: bool = False
    ignores_eos: bool = True  # only if the server accepts the field
    has_usage: bool = True  # the server is asked for its own counts of tokens
    tokens_per_word: float = 1.0
    overhead: float = 0.0
    api_key: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)

    def encode(self, prompt_ids: Sequence[int], num_output: int) -> bytes:
        """Return the bytes of a request, head and body, that generates `num_output` tokens in a stream."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": num_output,
            "temperature": 0,
            "stream": True,
        }
        prompt = list(prompt_ids) if self.uses_ids else self.text(prompt_ids)
        body |= (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.is_chat
            else {"prompt": prompt}
        )
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.has_usage:
            body["stream_options"] = {"include_usage": True}
        return self._http(json.dumps(body | dict(self.extra)).encode())

    def text(self, prompt_ids: Sequence[int]) -> str:
        """Return a text of about as many tokens. Prompts with equal beginnings have texts with equal beginnings."""
        words = max(1, round((len(prompt_ids) - self.overhead) / self.tokens_per_word))
        return " ".join(WORDS[token % len(WORDS)] for token in prompt_ids[:words])

    def _http(self, body: bytes) -> bytes:
        headers = [
            ("host", self.url.partition("://")[2].partition("/")[0]),
            ("content-type", "application/json"),
            ("accept", "text/event-stream"),
            ("accept-encoding", "identity"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.api_key is not None:
            headers.append(("authorization", f"Bearer {self.api_key}"))
        connection = h11.Connection(h11.CLIENT)
        head = connection.send(h11.Request(method="POST", target=self.path, headers=headers))
        return (head or b"") + body
