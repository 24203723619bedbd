"""Runs of the loads under each retention, and their figures."""

import statistics
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from lab.retention.belady import Clairvoyant, NextUses
from lab.retention.cachewise import CacheWise
from lab.retention.continuum import Continuum
from lab.retention.loads import LOADS
from lab.retention.saecache import SaeCache
from lab.retention.saga import Saga
from lab.shelf.loads import DEVICES
from lab.shelf.virtual import Call, Devices, Outcome, serve_calls
from orca_jax.helpers.reporting import percentile
from orca_jax.policy.kinds import made, made_retention, retention_kind
from orca_jax.policy.retention import PolicyRetention
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.spans import EngineRetention, Retainer
from orca_jax.sched.request import id_bytes, page_digest
from orca_jax.values.checks import is_class_name
from orca_jax.values.config import RETENTIONS
from orca_jax.values.errors import ConfigError

BASE, BOUND = "lru", "belady"
PAPERS: Mapping[str, type] = {
    "continuum": Continuum,
    "saecache": SaeCache,
    "saga": Saga,
    "cachewise": CacheWise,
}
RETENTIONS_SHOWN = (*RETENTIONS, *PAPERS, BOUND)
LOAD = 0.7
"""Of the requests per second that are served if all wait at the beginning, with the least recently used pages first."""
LIMITS: Devices = DEVICES._replace(max_batch=16)


def retention_of(name: str) -> EngineRetention | None:
    """A retention of the shelf, or of FILE.py:CLASS; None for the least recently used pages first.

    Raises:
        ConfigError: there is no such retention.
    """
    if name in PAPERS:
        return PolicyRetention(PAPERS[name](), name, _no_time)
    if is_class_name(name):
        own = made(retention_kind(name), "retention")
        return PolicyRetention(own, name.rpartition(":")[2], _no_time)
    if name not in RETENTIONS:
        known = ", ".join(RETENTIONS_SHOWN)
        message = f"policy must be FILE.py:CLASS or one of {known}, got {name!r}"
        raise ConfigError(message, param="policy")
    return made_retention(name)


def _no_time() -> float:
    """The time of calls: it is that of this machine, and the run is in virtual time."""
    return 0.0


def served(calls: Sequence[Call], name: str, num_pages: int, order: Sequence[int] = ()) -> Outcome:
    """Serve calls with a cache of so many pages. `order` is that of their begins, for `BOUND`."""
    devices = LIMITS._replace(num_pages=num_pages)
    size = devices.page_size
    if name == BOUND:
        turns = {index: turn for turn, index in enumerate(order)}
        uses = NextUses([_digests(calls[index].prompt, size) for index in order])

        def foreseen(pool: RequestPool) -> Retainer:
            return Clairvoyant(uses, size, lambda: pool.now)

        return serve_calls(
            _chunked, calls, devices, retain=foreseen, begun=lambda index: uses.begin(turns[index])
        )
    retention = retention_of(name)
    if retention is None:
        return serve_calls(_chunked, calls, devices)

    def ranked(pool: RequestPool) -> Retainer:
        return Retainer(retention, size, lambda: pool.now)

    return serve_calls(_chunked, calls, devices, retain=ranked)


def _chunked(devices: Devices) -> ChunkedScheduler:
    return ChunkedScheduler(devices.max_batch, devices.token_budget, FirstComeFirstServed())


def _digests(prompt: Sequence[int], size: int) -> list[bytes]:
    """The digests of the full pages of a prompt, as `Request.digests` has them."""
    found: list[bytes] = []
    parent = sha256(b"").digest()
    for begin in range(0, len(prompt) - size + 1, size):
        parent = page_digest(parent, id_bytes(prompt[begin : begin + size]))
        found.append(parent)
    return found


def saturation(load: str, num_pages: int, count: int, seed: int, traces: Path | None) -> float:
    """Requests per second if all calls wait at the beginning."""
    calls = [
        call._replace(arrival=0.0, after=None) for call in LOADS[load](1e9, count, seed, traces)
    ]
    services = served(calls, BASE, num_pages).services
    return count / max([service.end for service in services])


def measured(
    load: str, num_pages: int, count: int, seed: int, traces: Path | None, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The figures of each retention on the same calls."""
    rate = LOAD * saturation(load, num_pages, count, seed, traces)
    calls = LOADS[load](rate, count, seed, traces)
    base = served(calls, BASE, num_pages)
    order = sorted(range(len(calls)), key=lambda index: base.services[index].tokens[0])
    found = {}
    for name in names:
        outcome = base if name == BASE else served(calls, name, num_pages, order)
        found[name] = figures(calls, outcome)
    return found


def figures(calls: Sequence[Call], outcome: Outcome) -> dict[str, float]:
    """The hit rate, the share of prompt tokens that were computed, times of calls, and pages that were given up."""
    waits = [1e3 * (each.tokens[0] - each.arrival) for each in outcome.services]
    latencies = [each.end - each.arrival for each in outcome.services]
    return {
        "hit_rate": outcome.cached / sum([call.num_prompt for call in calls]),
        "mean_ttft_ms": statistics.fmean(waits),
        "p99_ttft_ms": percentile(waits, 99),
        "mean_latency_ms": 1e3 * statistics.fmean(latencies),
        "computed": 1.0 - outcome.cached / sum([call.num_prompt for call in calls]),
        "lost": float(outcome.lost),
    }
