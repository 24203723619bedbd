"""The start of an engine: its processes, the seconds of each phase, and a summary of what was started."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

StartPhase = Literal["import", "load", "trace", "compile", "warm_up"]
"""Start of Python and imports; devices and weights; tracing and lowering; XLA; the first run of each program."""
START_PHASES: tuple[StartPhase, ...] = get_args(StartPhase)

# There is little cyclic garbage, and a collection walks all requests: with Python's own thresholds and a thousand of
# them, collections take a twentieth of an engine's time and a twelfth of a front end's, and delay the slowest tokens.
RARE_COLLECTIONS = (100_000, 20, 20)
_M_ARENA_MAX = -8  # of glibc
_NUM_ARENAS = 2
LOADING_SILENCE = 60.0  # seconds; loading and compiling may hold the interpreter lock for long


def limit_arenas() -> None:
    """Let glibc allocate from few heaps.

    By default each of some twenty threads gets a heap of its own, and each heap keeps what it once needed: a server
    under load grew by 100 MiB in ten minutes (docs/decisions.md).
    """
    import ctypes  # help starts sooner without

    limit = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have no such function
    if limit is not None:
        limit(_M_ARENA_MAX, _NUM_ARENAS)


@dataclass(frozen=True)
class ClusterConfig:
    """The processes that run one engine together. Times are seconds."""

    nnodes: int
    node_rank: int
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    cluster_key_file: str | None = None
    control_timeout: float = 5.0
    join_timeout: float = 1800.0
    # certificate, key and certificate authorities of the coordinator
    mtls: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class StartReport:
    """The times of a start, in seconds.

    Phases may overlap, and some work belongs to none. So their sum may be more or less than the total.
    """

    seconds: dict[StartPhase, float]  # all phases; 0 for one that did not occur
    total: float
    programs: int = 0  # compiled or read from the cache
    from_cache: int = 0  # of these, read from the cache

    def text(self) -> str:
        """Return the total, and the phases of 50 ms or more, as `12.3 s (import 2.1, compile 8.0)`."""
        parts = [
            f"{name.replace('_', '-')} {time:.1f}"
            for name, time in self.seconds.items()
            if time >= 0.05
        ]
        return f"{self.total:.1f} s" + (f" ({', '.join(parts)})" if parts else "")


class WindowBlocks(NamedTuple):
    """The groups of layers with one window, and the blocks that a request of full length holds in them at most."""

    layers: int
    window: int | None  # tokens; None: all
    groups: int
    blocks: int  # in each group

    def text(self) -> str:
        """Return, for instance, `6 x 13 for 52 layers with a window of 1,024 tokens`."""
        blocks = f"{self.blocks:,}"
        tokens = "all tokens"
        if self.groups > 1:
            blocks = f"{self.groups} x {blocks}"
        if self.window is not None:
            tokens = f"a window of {self.window:,} tokens"
        return f"{blocks} for {self.layers} layer{'s' * (self.layers > 1)} with {tokens}"


class StateBlocks(NamedTuple):
    """The blocks of states. A block is one state in each layer that keeps one."""

    number: int
    rows: int  # requests that have one at the same time
    size: int  # bytes of a block, on all devices together

    def text(self) -> str:
        """Return, for instance, `128 states of 1.2 MiB for 64 requests and their snapshots`."""
        snapshots = " and their snapshots" if self.number > self.rows else ""
        requests = f"{self.rows:,} request{'s' * (self.rows > 1)}"
        return f"{self.number:,} states of {self.size / 2**20:.3g} MiB for {requests}{snapshots}"


@dataclass(frozen=True)
class EngineSummary:
    """The settings of an engine after the resolution of every "auto", and its start.

    An engine without a device has empty strings for its settings.
    """

    max_model_len: int
    kv_tokens: int  # that fit into the KV cache
    kv_requests: int  # of `max_model_len` tokens, that fit into the KV cache together
    token_budget: int  # most tokens of one launch, and with a token budget of one iteration
    scheduler: str
    start: StartReport
    device: str = ""  # kind, such as "cpu" or "NVIDIA H200"
    num_devices: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    attention: str = ""  # implementation
    page_size: int = 0  # tokens of a page of the KV cache
    num_pages: int = 0
    quantization: str | None = None  # of the weights
    products: str = ""  # of matrices on a CPU, see assembly/executor.py; empty on other devices
    kv_groups: tuple[WindowBlocks, ...] = ()  # of a model with windows
    kv_pools: tuple[int, ...] = ()  # blocks of each pool, if there are several
    kv_states: StateBlocks | None = None  # of a model with states
    kv_bytes: int = 0  # of the KV cache on all devices; a CPU takes them as they are used
    reuses_prefixes: bool = False  # there is a prefix cache

    def line(self, model: str) -> str:
        """Return the line of text about this engine for logs and terminals."""
        start = self.start
        place = "without a device"
        programs = ""
        if self.device:
            types = self.dtype
            if self.quantization is not None:
                types = f"{types} with {self.quantization} weights"
            place = f"on {self.num_devices} x {self.device}, {types}, attention by {self.attention}"
            if self.products:
                place = f"{place}, products by {self.products}"
            programs = f"{start.programs} programs ({start.from_cache} from the cache)"
        cache = " ".join(filter(None, (self.kv_cache_dtype, "KV cache")))
        parts = (
            f"{model} {place}",
            f"context of {self.max_model_len:,} tokens",
            f"{cache} of {self.kv_tokens:,} tokens ({self.kv_requests:,} full requests){self._blocks()}{self._bytes()}",
            "" if self.kv_states is None else self.kv_states.text(),
            f"scheduler {self.scheduler}, at most {self.token_budget:,} tokens at once",
            programs,
            f"ready after {start.text()}",
        )
        return "; ".join(filter(None, parts))

    def _bytes(self) -> str:
        """The bytes of the cache, as an addition to the line."""
        if not self.kv_bytes:
            return ""
        return f", {'at most ' if self.device == 'cpu' else ''}{self.kv_bytes / 2**30:.2f} GiB"

    def _blocks(self) -> str:
        """The blocks of a model with windows, as an addition to the line."""
        if not self.kv_groups:
            return ""
        total = f"{self.num_pages:,} blocks"
        if self.kv_pools:
            numbers = " and ".join(f"{number:,}" for number in self.kv_pools)
            total = f"{numbers} blocks, divided for requests of half the context"
        return f" in {total} of {self.page_size} tokens, of which one takes " + ", ".join(
            each.text() for each in self.kv_groups
        )


class StartTimes:
    """Measures the phases of a start. Any thread may call it.

    A phase may run several times, and in several threads at once. Seconds in which it runs at least once count once.

    Args:
        begun: begin of the total, in seconds of `clock`; None for now. Other processes of this machine may have read
            it: the monotonic clocks of Linux and macOS are those of the system.
        clock: seconds, monotonic.
    """

    def __init__(
        self, begun: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._begun = clock() if begun is None else begun
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(START_PHASES, 0.0)
        self._running = Counter[StartPhase]()
        self._since: dict[StartPhase, float] = {}  # of running phases
        self._programs = self._from_cache = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the begin of the total."""
        return max(0.0, self._clock() - self._begun)

    @contextmanager
    def phase(self, name: StartPhase) -> Iterator[None]:
        """Count the time of the block for a phase."""
        with self._lock:
            if not self._running[name]:
                self._since[name] = self._clock()
            self._running[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[name] -= 1
                if not self._running[name]:
                    self._seconds[name] += self._clock() - self._since.pop(name)

    def add_time(self, name: StartPhase, seconds: float) -> None:
        """Count time measured elsewhere for a phase, in addition to its blocks."""
        with self._lock:
            self._seconds[name] += seconds

    def count(self, programs: int, from_cache: int) -> None:
        """Add to the number of programs, and to the number of those read from the cache."""
        with self._lock:
            self._programs += programs
            self._from_cache += from_cache

    def report(self) -> StartReport:
        """The times up to now, those of running phases included."""
        with self._lock:
            now = self._clock()
            running = {name: now - since for name, since in self._since.items()}
            seconds = {name: self._seconds[name] + running.get(name, 0.0) for name in START_PHASES}
            return StartReport(
                seconds, max(0.0, now - self._begun), self._programs, self._from_cache
            )
