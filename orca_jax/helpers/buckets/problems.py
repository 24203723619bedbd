"""Errors of buckets: the object, the reason, and what to do.

The text of a server may repeat what was sent to it, such as the name of an account. It enters no message: of an answer
only its number is told.
"""

import re

from orca_jax.helpers.buckets.names import RETRIES

_STATUS = re.compile(r"(?:http_response_code='|HTTP code )(\d{3})")
_CURL = re.compile(r"curl_code='(\d+)'")
_OBJECT = re.compile(r'Error reading (?:Byte range \[\d+, \d+\) of )?(?:"([^"]+)"|(\S+)):')
_TRIES = f"after {RETRIES['max_retries']} further tries"
_CUT = "it has fewer bytes than it should have: it was cut or changed; copy it again"
_CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or gcloud auth application-default login",
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}


class BucketError(OSError):
    """An unreadable object."""


class NotAllowed(BucketError):
    """An object that these credentials may not read. Stores answer so for absent ones too, if listing is forbidden."""


class Beyond(BucketError):
    """A range beyond the end of an object."""


def error_of(url: str, error: Exception) -> BucketError:
    """Return the error for one of TensorStore's about the object of this name."""
    text = str(error)
    status = _status(text)
    message = f"{url}: {_reason(url, error)}"
    if status in (401, 403):
        return NotAllowed(message)
    if status == 416 or text.startswith("OUT_OF_RANGE"):
        return Beyond(message)
    return BucketError(message)


def problem_of_array(error: Exception) -> str:
    """Return the text of an error of an array of TensorStore, which may be in a bucket."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    is_known = _STATUS.search(text) or _CURL.search(text) or text.startswith("OUT_OF_RANGE")
    if not is_known and "http_response" not in text:
        return text[:200]
    found = _OBJECT.search(text)
    key = "" if found is None else found[1] or found[2]
    return f"{key or 'an object'}: {_reason(key, error)}"


def changed(url: str) -> str:
    """Return the problem of an object with another version than at the start."""
    return (
        f"{url} was changed or removed after the start of this load; load again when it is complete"
    )


def _reason(url: str, error: Exception) -> str:
    text = str(error)
    status = _status(text)
    if status is not None:
        return _of_status(status, url.partition("://")[0])
    if curl := _CURL.search(text):
        return (
            f"the connection failed {_TRIES} (curl {curl[1]}); check the network and the endpoint"
        )
    if isinstance(error, TimeoutError):
        return "the answer took too long; check the network and the endpoint"
    if text.startswith("OUT_OF_RANGE"):
        return _CUT
    if text.startswith("FAILED_PRECONDITION"):
        return "the server ignores ranges of bytes; use another endpoint"
    return f"it cannot be read ({_kind(error)}); check credentials, region, endpoint and name"


def _of_status(status: int, scheme: str) -> str:
    """The reason of an answer with an HTTP status."""
    if status in (401, 403):
        known = f": {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else ""
        return f"access is refused (HTTP {status}); check the name, and the credentials{known}"
    if status == 404:
        return "there is no such bucket or object (HTTP 404); check the name"
    if status == 416:
        return _CUT
    if status == 429 or status >= 500:
        return f"the server failed {_TRIES} (HTTP {status}); load again later"
    return f"the server refuses the request (HTTP {status}); check endpoint, region and name"


def _kind(error: Exception) -> str:
    """The name of an error in the words of TensorStore, without its text."""
    code = re.match(r"[A-Z_]{5,20}(?=:)", str(error))
    return code[0] if code else type(error).__name__


def _status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found[1]) if found else None
