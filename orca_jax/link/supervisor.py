"""Supervision of the engine process: starts it, detects its end or a hang, and restarts it if configured."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from orca_jax.link.client import EngineClient
from orca_jax.link.process_link import EngineLink
from orca_jax.link.restarts.bound import FIRST_PAUSE, FailureCount
from orca_jax.link.watch import STEP_FLOOR, ProgressWatch
from orca_jax.link.wire import FromEngine, Heartbeat, Phase, Ready
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError, EngineDeadError
from orca_jax.values.startup import LOADING_SILENCE

TICK_SECONDS = 0.25

logger = logging.getLogger(__name__)


class HangDetector:
    """Decides from the heartbeats if an engine hangs. Times are seconds."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._phase: Phase = "loading"
        self._busy = self._limit = 0.0
        self._place = ""
        self._loading = 0.0  # time since the start, until the engine serves

    def hear(self, heartbeat: Heartbeat) -> None:
        """Take the next heartbeat."""
        self._phase = heartbeat.phase
        self._busy = heartbeat.busy_seconds
        self._limit = heartbeat.limit_seconds
        self._place = heartbeat.place

    def serves(self) -> None:
        """Use the limits of a serving engine from now on, although its next heartbeat may come later."""
        self._phase = "serving"

    def verdict(self, silence: float, passed: float) -> str | None:
        """The reason to count the engine as hung; None if it is well.

        Args:
            silence: time since the last byte from the engine, without the time that a thread of it had to wait for a
                processor.
            passed: time since the last call of this method.
        """
        config = self._config
        if self._phase != "serving":
            self._loading += passed
            if self._loading > config.load_timeout:
                return f"the engine did not load within {config.load_timeout:g} s (--load-timeout)"
            limit = max(LOADING_SILENCE, config.heartbeat_timeout)
        else:
            limit = config.heartbeat_timeout
            allowed = config.step_timeout or max(self._limit, STEP_FLOOR)
            if self._busy > allowed:
                place = f" in {self._place}" if self._place else ""
                return f"the engine made no progress for {allowed:g} s{place} (--step-timeout sets this limit)"
        if silence > limit:
            return f"the engine sent no heartbeat for {limit:g} s"
        return None


@dataclasses.dataclass(eq=False)
class Supervisor:
    """Runs one engine process after another.

    Args:
        config: settings of the engine and its time limits.
        client: uses the process.
        on_ready: awaited when a process is ready, before the client accepts requests.
        begun: begin of the start that the first engine reports, in seconds of `time.monotonic`; None for its own.
        make_link: makes the link to a new process.
        sleep: waits between two processes.
    """

    config: ServerConfig
    client: EngineClient
    on_ready: Callable[[Ready], Awaitable[None]]
    _: dataclasses.KW_ONLY
    begun: float | None = None
    make_link: Callable[[Callable[[FromEngine], None], float | None], EngineLink] = EngineLink
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._failures = FailureCount()
        # true while a new engine loads the adapters of the one before
        self._is_loading_again = False

    async def run_engines(self) -> NoReturn:
        """Run engines until one ends that is not restarted.

        Raises:
            ConfigError: a setting is wrong.
            EngineDeadError: the engine died or hung, and restarts are disabled or it has failed too often.
        """
        while True:
            error = await self._run_one()
            pause = self._pause() if self.config.restarts and self._has_served else None
            if pause is None:
                self.client.give_up(error)
                raise error
            logger.error("%s; restarting it in %g s", error, pause)
            await self.sleep(pause)

    @property
    def _has_served(self) -> bool:
        return self.client.ready.done()

    async def _run_one(self) -> EngineDeadError | ConfigError:
        """Run one process from its start to its end; return the reason of its end."""
        self._is_loading_again = False
        detector = HangDetector(self.config)
        link = self.make_link(self.client.take_message, self.begun)
        self.begun = None  # a restart begins with its process
        self.client.attach(link, detector.hear)
        watcher = asyncio.create_task(self._watch(link, detector))
        try:
            await link.start(self._settings())
            try:
                ready = await link.ready
                detector.serves()
                await self._load_adapters(link)
                await self.on_ready(ready)
            except EngineDeadError:
                pass  # `exit_reason` below is more precise
            except ConfigError as error:
                self.client.lose("dead")
                return error
            else:
                self.client.serve(ready)
            await link.ended.wait()
            self.client.lose("dead")
            return await link.exit_reason()
        finally:
            watcher.cancel()
            await link.close()

    def _settings(self) -> ServerConfig:
        """The settings of the next engine; after a restart without adapters, since `_load_adapters` loads them."""
        if not self._has_served:
            return self.config
        return dataclasses.replace(
            self.config, engine=dataclasses.replace(self.config.engine, lora_modules=())
        )

    async def _load_adapters(self, link: EngineLink) -> None:
        """Load the adapters of the engine before. Raises EngineDeadError."""
        if not self._has_served:
            return
        self._is_loading_again = True
        if not await self.client.adapters.load_again(link.send, link.ended):
            raise EngineDeadError("the engine ended while it loaded an adapter again")
        self._is_loading_again = False

    async def _watch(self, link: EngineLink, detector: HangDetector) -> None:
        silence = ProgressWatch(time.monotonic, link.starved_seconds)
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            # This process may have been stopped or starved itself.
            passed = min(now - last, 2 * TICK_SECONDS)
            last = now
            reason = detector.verdict(silence.look(link.num_heard), passed)
            if reason is not None and not link.ended.is_set():
                self.client.lose("hung")
                link.kill(reason)
                return

    def _pause(self) -> float | None:
        """Seconds to wait before the next start; None if the engine has failed too often.

        An end while an adapter is loaded again does not count: soon the next engine goes on without the adapter.
        """
        if self._is_loading_again:
            return FIRST_PAUSE
        return self._failures.pause()
