"""Sleep of a paused engine: the devices' memory is free for others, such as the optimiser of a trainer.

Level 1 copies the weights to the memory of the host. Level 2 drops them: the weights of an update replace them. Pages
are dropped, so the prefix cache is empty afterwards. Nothing is compiled again.
"""

from collections.abc import Callable, Sequence, Set
from typing import Protocol, runtime_checkable

from orca_jax.engine import Engine
from orca_jax.link.wire import SleepTag
from orca_jax.values.errors import RequestError


@runtime_checkable
class SleepingExecutor(Protocol):
    """An executor whose weights and pages can leave the devices. No plan may be in flight."""

    def free_devices(self, *, keeps_weights: bool) -> None:
        """Free weights and pages; the memory of the host keeps weights if wished."""
        ...

    def restore_weights(self) -> None:
        """Put the weights back that the host keeps."""
        ...

    def allocate_pages(self) -> None:
        """Allocate empty pages."""
        ...


class EngineSleep:
    """The sleep of one engine.

    Args:
        engine: has an executor that may be unable to sleep.
        on_awake: called at the end of the sleep: weights and pages are back.

    Attributes:
        asleep: the tags of what is not in the memory of the devices.
    """

    def __init__(self, engine: Engine, on_awake: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_awake = on_awake
        self._level = 0
        self.asleep: set[SleepTag] = set()

    def begin(self, level: int) -> None:
        """Sleep from now on. The engine has no request. Raises RequestError."""
        executor = self._executor
        if self._engine.has_work:
            raise RequestError("requests are open: pause before")
        self._engine.forget_prefixes()
        executor.free_devices(keeps_weights=level == 1)
        self._level = level
        self.asleep = {"weights", "kv_cache"}

    def end(self, tags: Sequence[SleepTag]) -> None:
        """Put back what these tags name. Raises RequestError."""
        executor = self._executor
        wanted = self.asleep.intersection(tags)
        if "weights" in wanted and self._level == 2:
            raise RequestError(
                "the weights were dropped by level 2: update them, or wake up kv_cache alone",
                "tags",
            )
        if "weights" in wanted:
            executor.restore_weights()
        if "kv_cache" in wanted:
            executor.allocate_pages()
        self._wake(wanted)

    def take_weights(self) -> None:
        """Note that new weights are in place."""
        self._wake(self.asleep.intersection(["weights"]))

    def _wake(self, tags: Set[SleepTag]) -> None:
        """Note that what these tags name is back; all of it sleeps."""
        self.asleep -= tags
        if tags and not self.asleep:
            self._on_awake()

    def check_awake(self) -> None:
        """Refuse to go on without weights or pages. Raises RequestError."""
        if self.asleep:
            raise RequestError("the engine sleeps: wake it up in place of resuming it")

    @property
    def _executor(self) -> SleepingExecutor:
        executor = self._engine.executor
        if not isinstance(executor, SleepingExecutor):
            raise RequestError(
                "this engine cannot sleep: it is a toy, or has several processes (--nnodes)"
            )
        return executor
