"""Device time of a run, split by part of the model."""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax

from orca_jax.bench.measure import run_trace
from orca_jax.bench.traces import TraceRequest
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.exec.executor import JaxExecutor

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", re.MULTILINE)


def profile(engine: Engine, trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Run the trace once more under JAX's profiler and attribute each operation's own time to a part.

    The programs name their parts (`jax.named_scope`): attention with the write of K and V, sampling with the
    unembedding, and the rest, which is token-wise. Time that an operation spends in operations inside it, such as
    a loop's in its body, counts for those alone.

    Returns:
        Shares of the time in operations, adding up to 1.

    Raises:
        ConfigError: the engine has no device.
    """
    if not isinstance(engine.executor, JaxExecutor):
        raise ConfigError("the toy has no device to profile; leave out --profile", param="profile")
    parts = {
        name: _part(op)
        for program in engine.executor.programs.values()
        for name, op in _INSTRUCTION.findall(program.as_text() or "")
    }
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run_trace(engine, trace)
        (dump,) = Path(folder).rglob("*.xplane.pb")
        time = _own_time(dump, parts)
    total = sum(time.values())
    return {part: seconds / total for part, seconds in sorted(time.items())}


def _part(op_name: str) -> str:
    return next((part for part in ("attention", "sampling") if f"/{part}/" in op_name), "token-wise")


def _own_time(dump: Path, parts: dict[str, str]) -> Counter[str]:
    """Nanoseconds of each part, over all lines of the profile that ran operations of our programs."""
    time: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(dump)).planes:
        for line in plane.lines:
            events = [(e.start_ns, -e.duration_ns, e.name) for e in line.events if e.name in parts]
            stack: list[tuple[float, str]] = []  # (end, part) of the operations that are open
            for start, negative, name in sorted(events):
                while stack and stack[-1][0] <= start:
                    stack.pop()
                if stack:
                    time[stack[-1][1]] += negative
                time[parts[name]] -= negative
                stack.append((start - negative, parts[name]))
    return time
