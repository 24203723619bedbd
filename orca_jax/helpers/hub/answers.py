"""Checks of the answers of a server with the protocol of the Hub, before `huggingface_hub` uses them.

`HF_ENDPOINT` may name a mirror that is hostile or broken. Its answers must not name files outside the cache, and must
neither fill memory and disk nor take for ever.
"""

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import _http

from orca_jax.values.errors import ConfigError

MIN_BYTES = 10**6
WINDOW_SECONDS = 60.0
"""A download that has received fewer bytes in so many seconds ends."""

MAX_LIST_BYTES = 64 * 2**20
MAX_LISTS = 1000
"""The size of all answers of the API to one download together, and their number."""

_SILENT_SECONDS = 60.0
_TAG = re.compile(r"[A-Za-z0-9][\w.+=-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_TURN = threading.Lock()  # one client for the whole process


@contextmanager
def checked_answers(max_file_bytes: int) -> Iterator[None]:
    """Within the block, requests of `huggingface_hub` raise ConfigError for an answer that is refused.

    Downloads of several threads follow each other. Data of Xet storage does not pass this client and is not checked, so
    it is used for the library's own endpoint only: a mirror could escape the checks by it.

    Args:
        max_file_bytes: the largest body of a file.
    """
    with _TURN:
        answers = _Answers(max_file_bytes)
        # perhaps that of the user; there is no public way to read it
        make_client = _http._GLOBAL_CLIENT_FACTORY
        has_no_xet = constants.HF_HUB_DISABLE_XET

        def make_checked_client() -> httpx2.Client:
            client = make_client()
            hooks = client.event_hooks
            client.event_hooks = {
                "request": [*hooks["request"], _ask],
                "response": [*hooks["response"], answers.check],
            }
            return client

        set_client_factory(make_checked_client)
        constants.HF_HUB_DISABLE_XET = (
            has_no_xet or constants.ENDPOINT != constants._HF_DEFAULT_ENDPOINT
        )
        try:
            yield
        finally:
            set_client_factory(make_client)
            constants.HF_HUB_DISABLE_XET = has_no_xet


def _ask(request: httpx2.Request) -> None:
    """Ask for plain bytes, and bound the silence of the server, for which the library waits without end."""
    request.headers["Accept-Encoding"] = "identity"
    limits = request.extensions.get("timeout", {})
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), _SILENT_SECONDS)
    timeout |= {kind: seconds for kind, seconds in limits.items() if seconds is not None}
    request.extensions["timeout"] = timeout


class _Answers:
    """The answers to one download. Its threads share the counts."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._num_open = 0  # bodies that are being read
        self._since = self._num_bytes = 0.0  # of the present window
        self._list_bytes = self._num_lists = 0

    def check(self, response: httpx2.Response) -> None:
        """Refuse an answer by its header, and have its body counted."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":  # a few bytes could become gigabytes
            raise _refusal(
                response, f"is encoded as {encoding[:40]!r}, though plain bytes were asked for"
            )
        is_list = response.request.method == "GET" and _is_of_lists(response.request.url)
        if response.request.method == "HEAD":  # after redirects too, wherever they lead
            _check_names(response)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _CountedBody(
            response.stream, self._counted(response, response.stream, is_list)
        )
        if is_list:
            self._num_lists += 1
            if self._num_lists > MAX_LISTS:
                raise _refusal(response, f"is one of more than {MAX_LISTS} lists")
            _check_next(response)
            response.read()
            _check_list(response)

    def _counted(
        self, response: httpx2.Response, body: Iterable[bytes], is_list: bool
    ) -> Iterator[bytes]:
        with self._lock:
            if self._num_open == 0:
                self._since = time.monotonic()
                self._num_bytes = 0
            self._num_open += 1
        num_bytes = 0
        try:
            for part in body:
                num_bytes += len(part)
                self._check_pace(response, len(part))
                self._list_bytes += is_list * len(part)
                if self._list_bytes > MAX_LIST_BYTES:
                    size = f"lists of more than {MAX_LIST_BYTES // 2**20} MiB"
                    raise _refusal(response, f"has {size}")
                if not is_list and num_bytes > self._max_file_bytes:
                    size = f"more than the {self._max_file_bytes} bytes that it may have"
                    raise _refusal(response, f"has {size}")
                yield part
        finally:
            with self._lock:
                self._num_open -= 1

    def _check_pace(self, response: httpx2.Response, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            now = time.monotonic()
            if now - self._since < WINDOW_SECONDS:
                return
            if self._num_bytes < MIN_BYTES:  # the window stays, so that the other threads end too
                reason = f"is too slow: {self._num_bytes / 1e6:.2f} MB in {now - self._since:.0f} s, all files together"
                raise _refusal(response, f"{reason}; check the network and HF_ENDPOINT")
            self._since = now
            self._num_bytes = 0


class _CountedBody(httpx2.SyncByteStream):
    """The body of an answer, with another iterator of its parts."""

    def __init__(self, body: httpx2.SyncByteStream, parts: Iterator[bytes]) -> None:
        self._body = body
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        self._body.close()


def _check_names(response: httpx2.Response) -> None:
    """Refuse tags and commits that are paths.

    `huggingface_hub` 2.4.0 makes file names of both without a look: `ETag: ../../x` writes outside the cache. This
    check and that of lists can go when the required version refuses such names.
    """
    commit = response.headers.get("X-Repo-Commit")
    if commit is None:  # then no name is made of the tag
        return
    _check_name(response, "commit", commit, _COMMIT)
    tag = response.headers.get("X-Linked-ETag") or response.headers.get("ETag")
    if tag is not None and response.status_code < 400:
        _check_name(response, "ETag", tag.removeprefix("W/").strip('"'), _TAG)


def _is_of_lists(url: httpx2.URL) -> bool:
    return "/api/models/" in url.path


def _check_next(response: httpx2.Response) -> None:
    """Refuse redirects and further pages at other addresses, where a list would not be known as one."""
    followed = response.links.get("next", {}).get("url"), response.headers.get("Location")
    for target in filter(None, followed):
        if not _is_of_lists(response.request.url.join(target)):
            raise _refusal(
                response, f"leads to {target[:80]!r}, which is not an address of the API"
            )


def _check_list(response: httpx2.Response) -> None:
    """The same for names in the description of a model, and in the list of its files."""
    try:
        value: Any = response.json()
    except ValueError:
        return  # the library has an error for it
    if isinstance(value, dict) and "sha" in value:
        _check_name(response, "commit", value["sha"], _COMMIT)
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("lfs"), dict):
            for name in ("oid", "sha256"):
                _check_name(response, "digest", entry["lfs"].get(name, "0"), _TAG)


def _check_name(response: httpx2.Response, kind: str, name: object, form: re.Pattern[str]) -> None:
    if not isinstance(name, str) or form.fullmatch(name) is None:
        raise _refusal(
            response, f"has the {kind} {str(name)[:80]!r}, which is not safe as the name of a file"
        )


def _refusal(response: httpx2.Response, reason: str) -> ConfigError:
    url = str(response.request.url.copy_with(query=None))[:200]
    return ConfigError(f"the answer of {url} {reason}")
