"""Why a call gets no answer from the engine, in terms of the engine: HTTP knows how to say it to a client.

LinkError
|- Unavailable    no engine serves: it loads, drains, hangs, or has ended
|- Overloaded     the queue has no room now
|- CallTooLarge   the queue could never hold this call
`- TimedOut       a limit in seconds was reached
"""

from typing import Literal


class LinkError(Exception):
    """The base of all of these; `message` is for the caller."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Unavailable(LinkError):
    """The call was sound; another replica, or this one later, may answer it."""


class Overloaded(LinkError):
    """`code` names what is full: the number of requests, or the tokens of waiting prompts."""

    def __init__(self, message: str, code: Literal["queue_full", "overloaded"]) -> None:
        super().__init__(message)
        self.code = code


class CallTooLarge(LinkError):
    """`param` names the field that makes the call too large."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TimedOut(LinkError):
    """`code` names the limit: the wait for a first token, the whole call, or a client that does not read."""

    def __init__(self, message: str, code: Literal["queue_timeout", "timeout", "client_too_slow"]) -> None:
        super().__init__(message)
        self.code = code
