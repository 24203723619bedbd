"""Keeps an engine process behind the client: starts it, notices that it ended or hangs, starts it again if told to."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn

from orca_jax.errors import ConfigError, EngineDeadError
from orca_jax.link.client import EngineClient
from orca_jax.link.process_link import EngineLink
from orca_jax.link.wire import FromEngine, Heartbeat, Phase, Ready
from orca_jax.server_config import ServerConfig

TICK_SECONDS = 0.25
LOADING_SILENCE = 60.0  # seconds: libraries that load or compile hold the interpreter for long
MAX_FAILURES = 5  # within FAILURE_WINDOW, and no engine is started any more
FAILURE_WINDOW = 300.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between an end and the next start, doubling

logger = logging.getLogger(__name__)


class HangDetector:
    """Judges an engine by its heartbeats. Times are seconds."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._phase: Phase = "loading"
        self._busy = 0.0
        self._loading = 0.0  # time since the start until it serves

    def hear(self, beat: Heartbeat) -> None:
        """The engine said how it is."""
        self._phase = beat.phase
        self._busy = beat.busy_seconds

    def serves(self) -> None:
        """The engine is ready: no more patience, even if its next sign of life says so only later."""
        self._phase = "serving"

    def verdict(self, silence: float, passed: float) -> str | None:
        """Why the engine counts as hung; None while it does not.

        Args:
            silence: since anything was heard of it.
            passed: since the last call.
        """
        config = self._config
        if self._phase != "serving":
            self._loading += passed
            if self._loading > config.load_timeout:
                return f"the engine did not load within {config.load_timeout:g} s (--load-timeout)"
            limit = max(LOADING_SILENCE, config.heartbeat_timeout)
        else:
            limit = config.heartbeat_timeout
            if self._busy > config.step_timeout:
                return f"an iteration took longer than {config.step_timeout:g} s (--step-timeout)"
        return f"the engine gave no sign of life for {limit:g} s" if silence > limit else None


class Supervisor:
    """One engine process at a time.

    Args:
        config: what to start, and how patient to be.
        client: which gets the process.
        on_ready: awaited when a process can serve, before the client says so.
        make_link, sleep: the process, and the passing of time between two of them.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        on_ready: Callable[[Ready], Awaitable[None]],
        *,
        make_link: Callable[[Callable[[FromEngine], None]], EngineLink] = EngineLink,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._client = client
        self._on_ready = on_ready
        self._make_link = make_link
        self._sleep = sleep
        self._failures: deque[float] = deque()  # times of the last ends

    async def run(self) -> NoReturn:
        """Run engines until there is none any more.

        Raises:
            ConfigError: a setting is wrong.
            EngineDeadError: the engine died or hung, and is not to be started again, or not yet again.
        """
        while True:
            error = await self._run_one()
            pause = self._pause() if self._config.restart_engine and self._client.ready.done() else None
            if pause is None:
                self._client.give_up(error)
                raise error
            logger.error("%s; it is started again in %g s", error, pause)
            await self._sleep(pause)

    async def _run_one(self) -> EngineDeadError | ConfigError:
        """A process, from its start to its end. Returns why it ended."""
        detector = HangDetector(self._config)
        link = self._make_link(self._client.take)
        self._client.attach(link, detector.hear)
        watcher = asyncio.create_task(self._watch(link, detector))
        try:
            await link.start(self._config)
            try:
                ready = await link.ready
                detector.serves()
                await self._on_ready(ready)
            except EngineDeadError:
                pass  # told better below
            except ConfigError as error:
                self._client.lose("dead")
                return error
            else:
                self._client.serve(ready)
            await link.ended.wait()
            self._client.lose("dead")
            return await link.exit_reason()
        finally:
            watcher.cancel()
            await link.close()

    async def _watch(self, link: EngineLink, detector: HangDetector) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            # Where this process itself was stopped or starved, the engine may have spoken unheard.
            passed, last = min(now - last, 2 * TICK_SECONDS), now
            link.unheard += passed
            reason = detector.verdict(link.unheard, passed)
            if reason is not None and not link.ended.is_set():
                self._client.lose("hung")
                link.kill(reason)
                return

    def _pause(self) -> float | None:
        """Seconds to wait before the next start; None where it has failed too often."""
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - FAILURE_WINDOW:
            self._failures.popleft()
        count = len(self._failures)
        return None if count >= MAX_FAILURES else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
