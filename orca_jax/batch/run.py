"""A batch run: recovers the rows already done, then answers the others through a window into the output."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.batch.answers import Answer, RowSummary, answer_row, error_row, row_summary
from orca_jax.batch.config import BatchConfig
from orca_jax.batch.display import Display
from orca_jax.batch.input import InputFile, check_readable, examine, read_lines
from orca_jax.batch.ledger import Ledger
from orca_jax.batch.local import Answerer, LocalEngine
from orca_jax.batch.output import AsFinished, InputOrder, OutputFile, Writer
from orca_jax.batch.record import REMEDY, RunRecord, record_of
from orca_jax.batch.remote import RemoteServer, read_api_key
from orca_jax.batch.rows import BadLine, Row, RowReader, repeated
from orca_jax.batch.summary import Summary
from orca_jax.helpers.console import progress_bar
from orca_jax.link.open_files import file_limit, free_files, raise_file_limit
from orca_jax.serve.openai.model import check_texts, downloaded
from orca_jax.values.errors import ConfigError, EngineError

# bytes of answers waiting for an earlier row or for the disk; above it no row is read
MAX_HELD = 32 * 2**20
RESERVED_FILES = 16  # beside the connections to a server
TURN = 256  # lines after which other tasks may run


def run_batch(config: BatchConfig, built: Built | None = None) -> Summary:
    """Answer every line of the input without a row in the output.

    Args:
        config: checked settings.
        built: an engine for `config.server.engine`; it stays open. None: build one if a row is left to answer.

    Raises:
        ConfigError: a setting, the input or the output is wrong; `param` names the flag.
        EngineError: the engine or the server has failed. The rows answered before are in the output.
        OSError: the output cannot be written.
        KeyboardInterrupt: on SIGINT or SIGTERM. The rows answered before are in the output.
    """
    shows = config.server.engine.progress
    summary = Summary()
    check_readable(config.input)
    with OutputFile(config.output, overwrite=config.overwrite) as output, Ledger() as ledger:
        with summary.timed("examine_s"):
            file = examine(config.input, progress_bar("Reading", shows))
        record = record_of(file, config.meaning)
        with summary.timed("resume_s"):
            _recover(config, record, output, ledger, summary)
        if ledger.num_done == file.num_lines:
            output.begin()
            return summary
        with _opened(config, built, summary) as answerer:
            display = Display(file.num_lines, ledger.num_done, sys.stderr, enabled=shows)
            run = BatchRun(config, file, record, ledger, summary, display)
            try:
                asyncio.run(run.answer_rows(answerer, output))
            except asyncio.CancelledError:  # by SIGTERM
                raise KeyboardInterrupt from None
            finally:
                display.close()
    return summary


def _recover(
    config: BatchConfig, record: RunRecord, output: OutputFile, ledger: Ledger, summary: Summary
) -> None:
    """Read the rows of earlier processes. Raises ConfigError."""
    for number, row in enumerate(output.recover(record), start=1):
        line = record.line_of(row.id)
        is_next = line == number or config.order == "finished"
        if line is None or not is_next or not ledger.mark_done(line, row.custom_id):
            message = (
                f"line {number} of {config.output} does not belong to this batch, or not in this "
                f"position; {REMEDY}"
            )
            raise ConfigError(message, param="output")
        summary.add_row(row.summary)
    summary.begin(ledger.num_done)


@contextmanager
def _opened(config: BatchConfig, built: Built | None, summary: Summary) -> Iterator[Answerer]:
    """The source of answers: a server or an engine. Raises ConfigError."""
    if config.base_url is not None:
        _check_files(config.window)
        yield RemoteServer(
            config.base_url,
            api_key=read_api_key(config.api_key_file),
            concurrency=config.window,
            max_retries=config.max_retries,
            timeout=config.request_timeout,
        )
        return
    if built is not None:
        yield LocalEngine(built, config.server)
        return
    with summary.timed("load_s"):
        server = downloaded(config.server)
        check_texts(server)
        built = build_engine(server.engine)
    with built:
        yield LocalEngine(built, server)


def _check_files(num_connections: int) -> None:
    """Refuse more connections to a server than the limit of open files allows. Raises ConfigError."""
    raise_file_limit()
    free = free_files(RESERVED_FILES)
    if num_connections > free:
        message = (
            f"must be at most {free}, since the limit of open files is {file_limit()} (ulimit -n)"
        )
        raise ConfigError(message, param="concurrency")


@dataclass(eq=False)
class BatchRun:
    """The rows of a run between input and output. Belongs to one event loop."""

    config: BatchConfig
    file: InputFile
    record: RunRecord
    ledger: Ledger
    summary: Summary
    display: Display

    def __post_init__(self) -> None:
        config = self.config
        self._reader = RowReader(config.line_format, config.model, config.defaults)
        self._order = (
            InputOrder(self.ledger.num_done + 1) if config.order == "input" else AsFinished()
        )
        self._num_open = 0
        self._changed = asyncio.Event()

    async def answer_rows(self, answerer: Answerer, output: OutputFile) -> None:
        """Answer the remaining rows. Raises the same errors as `run_batch`."""
        wakes = partial(asyncio.get_running_loop().call_soon_threadsafe, self._changed.set)
        self._answerer = answerer
        async with AsyncExitStack() as stack:
            with self.summary.timed("load_s"):
                await stack.enter_async_context(answerer)
            await stack.enter_async_context(_ended_by_sigterm())
            await stack.enter_async_context(_beside(self.display.say_lines()))
            start = time.monotonic()
            self._writer = Writer(output, wakes)
            try:
                await self._answer_all()
            finally:
                self.summary.figures.update(answerer.figures())
                try:
                    await asyncio.to_thread(self._writer.finish)
                finally:
                    self.summary.end(time.monotonic() - start, self._writer.seconds)

    async def _answer_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(self._rows_left()) as rows:
                async for row in rows:
                    self._begin(row, tasks)
        except* (ConfigError, EngineError, OSError) as group:
            errors = group
        else:
            return
        raise _first(errors)

    def _begin(self, row: Row | BadLine, tasks: asyncio.TaskGroup) -> None:
        """Write the error of a bad line, or start to answer a row."""
        if isinstance(row, BadLine):
            row_id = self.record.row_id(row.line)
            self._put(row.line, error_row(row_id, row), RowSummary(row.code))
        else:
            self._num_open += 1
            tasks.create_task(self._answer(row))

    async def _rows_left(self) -> AsyncGenerator[Row | BadLine]:
        """The rows missing in the output, each when there is room for it. Raises ConfigError and OSError."""
        for number, text in enumerate(read_lines(self.file), start=1):
            row = self._reader.read(number, text)
            if isinstance(row, Row):
                first = self.ledger.first_line(number, row.custom_id)
                row = row if first == number else repeated(row, first)
            if not self.ledger.is_done(number, row.custom_id):
                await self._wait_for_room()
                yield row
            if number % TURN == 0:
                await asyncio.sleep(0)

    async def _wait_for_room(self) -> None:
        while (
            self._num_open >= self.config.window
            or self._order.held + self._writer.backlog > MAX_HELD
        ):
            self._changed.clear()
            await self._changed.wait()
        if self._writer.error is not None:
            raise self._writer.error

    async def _answer(self, row: Row) -> None:
        row_id = self.record.row_id(row.line)
        answer: Answer = await self._answerer.answer(row, row_id)
        self._put(
            row.line, answer_row(row_id, row, answer), row_summary(answer.status, answer.body)
        )
        self._num_open -= 1
        self._changed.set()

    def _put(self, line: int, row: bytes, summary: RowSummary) -> None:
        ready = self._order.add_row(line, row)
        if ready:
            self._writer.put(ready)
        self.summary.add_row(summary)
        self.display.add_row(summary.completion_tokens)


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine in the background until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def _ended_by_sigterm() -> AsyncIterator[None]:
    """Cancel the block on SIGTERM. SIGINT cancels it by default."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
