"""Reasons for a call without an answer from the engine. `serve/openai/errors.py` makes HTTP answers of them.

LinkError
|- Unavailable    no engine serves: it is loading, draining or hung, or it has ended
|- Overloaded     the queue has no room now
|- CallTooLarge   the call is larger than the queue
`- TimedOut       a time limit was reached
"""

from typing import Literal


class LinkError(Exception):
    """Base class; `message` is for the caller."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Unavailable(LinkError):
    """No engine serves. The call is valid; another replica, or this one later, may answer it."""


class Overloaded(LinkError):
    """The queue is full. `code` names the bound: "queue_full" for requests, "overloaded" for prompt tokens."""

    def __init__(self, message: str, code: Literal["queue_full", "overloaded"]) -> None:
        super().__init__(message)
        self.code = code


class CallTooLarge(LinkError):
    """The call is larger than the queue. `param` names the field to reduce."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TimedOut(LinkError):
    """A time limit was reached. `code` names it: the wait for a first token, the whole call, or a slow client."""

    def __init__(
        self, message: str, code: Literal["queue_timeout", "timeout", "client_too_slow"]
    ) -> None:
        super().__init__(message)
        self.code = code
