"""Steps of the interpreter, and processor time of what it cannot count: the work of libraries in C."""

import gc
import sys
import time
from collections.abc import Callable

EVENTS = sys.monitoring.events

type Work = Callable[[], object]


def steps_of(work: Work) -> int:
    """The lines, calls and jumps of loops that the interpreter executes for a piece of work."""
    counted = 0

    def count(*event: object) -> None:
        nonlocal counted
        counted += 1

    monitoring = sys.monitoring
    tool = next(number for number in range(6) if monitoring.get_tool(number) is None)
    monitoring.use_tool_id(tool, "steps")
    try:
        for event in (EVENTS.LINE, EVENTS.JUMP, EVENTS.PY_START, EVENTS.CALL):
            monitoring.register_callback(tool, event, count)
        monitoring.set_events(tool, EVENTS.LINE | EVENTS.JUMP | EVENTS.PY_START | EVENTS.CALL)
        work()
    finally:
        monitoring.set_events(tool, EVENTS.NO_EVENTS)
        monitoring.free_tool_id(tool)
    return counted


def seconds_of(make: Callable[[], Work], repeats: int = 3) -> float:
    """The least processor time of this thread for a piece of work, each time made anew.

    The garbage collector waits meanwhile: its time depends on the objects of other tests.
    """
    least = float("inf")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            work = make()
            start = time.thread_time()
            work()
            least = min(least, time.thread_time() - start)
    finally:
        if was_enabled:
            gc.enable()
    return least
