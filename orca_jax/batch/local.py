"""Answers from an engine in this process, on the path of the server but without HTTP or a second process."""

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from orca_jax.assembly.built import Built
from orca_jax.batch.answers import Answer
from orca_jax.batch.rows import DECISIONS, Row
from orca_jax.engine import HOST_PARTS, totals
from orca_jax.link.client import EngineClient
from orca_jax.link.loop import ready_message
from orca_jax.link.thread_link import EngineThread
from orca_jax.serve.openai.answer import whole_answer
from orca_jax.serve.openai.decisions import call as calls
from orca_jax.serve.openai.decisions import wires
from orca_jax.serve.openai.endpoints import ENDPOINTS
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Generation
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema import decision_parser
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import EngineError

MAX_WARNINGS = 32  # about ignored fields

logger = logging.getLogger(__name__)


class Answerer(Protocol):
    """A source of answers to rows. An async context manager; `answer` may be called while it is entered."""

    async def answer(self, row: Row, row_id: str) -> Answer:
        """The answer to a row, possibly an error answer.

        Raises:
            OrcaError: no further row can be answered.
        """
        ...

    def figures(self) -> Mapping[str, float]:
        """Figures for the final summary since it was entered, such as times and the mean batch size."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class LocalEngine:
    """Answers rows with an engine that runs in a thread. The caller closes its executor.

    Args:
        built: the engine, owned by the thread while this is entered.
        config: names and limits of the model.
    """

    def __init__(self, built: Built, config: ServerConfig) -> None:
        self._built = built
        self._config = config
        self._before: dict[str, float] = {}
        self._ignored: set[str] = set()

    async def __aenter__(self) -> Self:
        """Start the thread and load the tokenizer and chat template of the model. Raises ConfigError."""
        observer = ServerObserver(self._config)
        client = EngineClient(self._config)
        self._service = Service(client, self._config, observer)
        ready = ready_message(self._built)
        await self._service.set_ready(ready)
        self._before = self._totals()
        self._thread = EngineThread(self._built, client)
        client.attach(self._thread)
        client.serve(ready)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread after its current step, and the processes of the chat template."""
        try:
            await self._thread.stop()
        finally:
            self._service.close()

    async def answer(self, row: Row, row_id: str) -> Answer:
        """The answer that the server would give. Raises EngineError if the engine has failed."""
        try:
            answer = self._decide if row.url == DECISIONS else self._complete
            return Answer(200, row_id, await answer(row, row_id))
        except ApiError as error:
            if self._thread.failure is not None:
                raise EngineError(
                    f"the engine failed: {self._thread.failure}"
                ) from self._thread.failure
            return Answer(error.status, row_id, error.encode())
        except Exception:
            logger.exception("line %d: the call failed with an unexpected error", row.line)
            return Answer(
                500,
                row_id,
                ApiError(500, "an internal error occurred", code="internal_error").encode(),
            )

    def figures(self) -> Mapping[str, float]:
        """Seconds of the engine's thread by activity, number of iterations and mean requests per iteration."""
        grown = {name: value - self._before.get(name, 0) for name, value in self._totals().items()}
        iterations = grown["iterations"]
        seconds = {f"{part}_s": grown[f"{part}_seconds"] for part in HOST_PARTS}
        mean = grown["scheduled_requests"] / max(iterations, 1)
        return {"iterations": iterations, **seconds, "mean_batch_size": mean}

    def _totals(self) -> dict[str, float]:
        engine = self._built.engine
        return totals(engine.stats, engine.executor.stats)

    async def _decide(self, row: Row, row_id: str) -> bytes:
        service = self._service
        call, ignored = decision_parser.parse(
            row.body, ignores_unknown=self._config.unknown_fields == "ignore"
        )
        service.check_model(call.model)
        if names := {*ignored.known, *ignored.unknown} - self._ignored:
            self._warn_of(names, row.line)
        job = await calls.prepare(service, wires.understood(service, call, row_id))
        decided = await calls.run(service, job, _nothing)
        model = service.answering(call.model)
        return wires.answer(call, job, decided, model)

    async def _complete(self, row: Row, row_id: str) -> bytes:
        service = self._service
        endpoint = ENDPOINTS[row.url]
        call, ignored = endpoint.parser.parse(
            row.body, ignores_unknown=self._config.unknown_fields == "ignore"
        )
        service.check_model(call.model)
        if call.stream:
            raise ApiError(
                400, "stream must be false or left out: a batch returns whole answers", "stream"
            )
        job = await endpoint.prepare(service, call, row_id)
        if names := {*ignored.known, *ignored.unknown, *job.ignored, *job.left_out} - self._ignored:
            self._warn_of(names, row.line)
        renderer = endpoint.renderer(service.model.tokenizer, job, call)
        # nothing else runs in this event loop before the call is sent
        self._thread.reads_at_once = bool(job.stops)
        return await whole_answer(Generation(service, job), renderer, _nothing)

    def _warn_of(self, names: set[str], line: int) -> None:
        """Log the first line with each ignored field. Names of unknown fields are input, so their number is limited."""
        if len(self._ignored) < MAX_WARNINGS:
            self._ignored |= names
            shown = ", ".join(ascii(name[:64])[1:-1] for name in sorted(names)[:MAX_WARNINGS])
            logger.warning(
                "line %d: these fields are ignored, here and in later lines: %s", line, shown
            )


async def _nothing() -> Mapping[str, Any]:
    """The `receive` of a client that never disconnects."""
    return await asyncio.get_running_loop().create_future()
