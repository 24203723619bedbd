"""The front end's work on the bytes of callers, off the event loop: each kind has threads, limits and errors."""

import asyncio
from collections.abc import Awaitable, Callable

from orca_jax.serve.openai.errors import ApiError
from orca_jax.text.work_threads import (
    ENCODING,
    LARGE_PARSING,
    LARGE_PREPARING,
    PAGES,
    PARSING,
    PREPARING,
    SCHEMAS,
    STORED,
    TEMPLATES,
    WorkKind,
    WorkThreads,
)
from orca_jax.values.errors import EngineError, RequestError

# bytes; the work on a smaller body takes milliseconds, less than to wait for a thread
SMALL_BODY = 16 * 1024
LARGE_BODY = 2**20  # bytes
RETRY_SECONDS = 5
_KINDS = (
    ENCODING,
    LARGE_PARSING,
    LARGE_PREPARING,
    PAGES,
    PARSING,
    PREPARING,
    SCHEMAS,
    STORED,
    TEMPLATES,
)
_CODES = {ENCODING: "tokenizer_unavailable", TEMPLATES: "template_unavailable"}
_OTHER_CODE = "front_end_busy"


class FrontEndWork:
    """The threads of one server.

    Attributes:
        threads: the threads of each kind.
    """

    def __init__(self) -> None:
        self.threads = {kind: WorkThreads(kind) for kind in _KINDS}

    async def run_work[T](
        self, kind: WorkKind, work: Callable[[], T], param: str | None = None
    ) -> T:
        """The result of `work`, which a thread does.

        Args:
            kind: the kind of the work.
            work: a call that reads or changes nothing of the event loop.
            param: the field that errors name; None: the field that the error has.

        Raises:
            ApiError: 400 if the work is refused or takes too long, 503 if its threads are busy or stuck.
        """
        try:
            return await self.threads[kind].run_async(work)
        except RequestError as error:
            raise ApiError(400, error.message, param or error.param) from None
        except EngineError as error:
            retry = {"retry-after": str(RETRY_SECONDS)}
            raise ApiError(
                503, str(error), code=_CODES.get(kind, _OTHER_CODE), headers=retry
            ) from None

    async def read[T](self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which reads a body of so many bytes. Raises ApiError."""
        if num_bytes < SMALL_BODY:
            return work()
        return await self.run_work(PARSING if num_bytes < LARGE_BODY else LARGE_PARSING, work)

    async def page[T](self, work: Callable[[], T]) -> T:
        """The result of `work` for a page of the playground. Raises ApiError."""
        return await self.run_work(PAGES, work)

    async def prepare[T](self, num_bytes: int, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work` on the fields of a body of so many bytes.

        A thread with its own event loop converts and checks the fields of a large one.

        Raises:
            ApiError: as `run_work`, or an error of the work.
        """
        if num_bytes < SMALL_BODY:
            return await work()

        async def whole() -> T:
            return await work()

        kind = PREPARING if num_bytes < LARGE_BODY else LARGE_PREPARING
        return await self.run_work(kind, lambda: asyncio.run(whole()))
