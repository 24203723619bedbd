"""Rows answered by an engine in this process: the server's own path, without HTTP and without a second process."""

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Message as Event

from orca_jax.batch.answers import Answer
from orca_jax.batch.rows import Row
from orca_jax.build.engine import Built
from orca_jax.engine import HOST_PARTS, totals
from orca_jax.errors import EngineError
from orca_jax.link.client import EngineClient
from orca_jax.link.loop import ready_message
from orca_jax.link.thread_link import EngineThread
from orca_jax.openai.answer import whole_answer
from orca_jax.openai.endpoints import ENDPOINTS
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Generation
from orca_jax.openai.model import Service
from orca_jax.server_config import ServerConfig
from orca_jax.telemetry.observer import ServerObserver

logger = logging.getLogger(__name__)


class Answerer(Protocol):
    """Whoever answers rows. An async context manager; rows may be answered while it is entered."""

    async def answer(self, row: Row, row_id: str) -> Answer:
        """The answer to a row, be it a refusal.

        Raises:
            OrcaError: nobody can be answered any more.
        """
        ...

    def figures(self) -> Mapping[str, float]:
        """Where the time went since it was entered, and the mean batch size, as far as it is known."""
        ...

    async def __aenter__(self) -> Self:
        """Begin."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; rows that are open are given up."""
        ...


class LocalEngine:
    """Answers rows with an engine that runs in a thread. The caller closes its executor.

    Args:
        built: the engine, which the thread owns while this is entered.
        config: names and limits of the model.
    """

    def __init__(self, built: Built, config: ServerConfig) -> None:
        self._built = built
        self._config = config
        self._before: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Start the thread, and load the text side of the model. Raises ConfigError."""
        observer = ServerObserver(self._config)
        client = EngineClient(self._config)
        self._service = Service(client, self._config, observer)
        ready = ready_message(self._built, self._config.engine.model)
        await self._service.set_ready(ready)
        self._before = self._totals()
        self._thread = EngineThread(self._built, client)
        client.attach(self._thread)
        client.serve(ready)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread after its step, and the processes of the chat template."""
        try:
            await self._thread.stop()
        finally:
            self._service.close()

    async def answer(self, row: Row, row_id: str) -> Answer:
        """As the server would. Raises EngineError where the engine has failed."""
        try:
            return Answer(200, row_id, await self._complete(row, row_id))
        except ApiError as error:
            if self._thread.failure is not None:
                raise EngineError(f"the engine failed: {self._thread.failure}") from self._thread.failure
            return Answer(error.status, row_id, error.encode())
        except Exception:
            logger.exception("line %d: a call crashed", row.line)
            return Answer(500, row_id, ApiError(500, "an internal error occurred", code="internal_error").encode())

    def figures(self) -> Mapping[str, float]:
        """Seconds of the engine's thread by what it did, iterations, and requests in each."""
        grown = {name: value - self._before[name] for name, value in self._totals().items()}
        iterations = grown["iterations"]
        seconds = {f"{part}_s": grown[f"{part}_seconds"] for part in HOST_PARTS}
        mean = grown["scheduled_requests"] / max(iterations, 1)
        return {"iterations": iterations, **seconds, "mean_batch_size": mean}

    def _totals(self) -> dict[str, float]:
        engine = self._built.engine
        return totals(engine.stats, engine.executor.stats)

    async def _complete(self, row: Row, row_id: str) -> bytes:
        service, endpoint = self._service, ENDPOINTS[row.url]
        call = endpoint.parser.parse(row.body)
        service.check_model(call.model)
        if call.stream:
            raise ApiError(400, "stream must be false or left out: a batch has whole answers", "stream")
        job = await endpoint.prepare(service, call, row_id)
        shape = endpoint.renderer(service.model.tokenizer, job, call)
        self._thread.reads_at_once = bool(job.stops)  # the call is sent before anybody else has a turn
        return await whole_answer(Generation(service, job), shape, _nothing)


async def _nothing() -> Event:
    """What a caller sends who never hangs up."""
    return await asyncio.get_running_loop().create_future()
