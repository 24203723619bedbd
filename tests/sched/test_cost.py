"""The cost of a selection does not depend on the number of waiting requests. Counts reads of requests, not time."""

from collections import Counter

import pytest

from orca_jax.assembly.choices import ordering_kind
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.plan import make_plan
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.values.config import ORDERINGS
from orca_jax.values.request import SamplingParams

FIELDS = ("row", "in_flight", "state", "arrival_index")


def num_reads(
    monkeypatch: pytest.MonkeyPatch, name: str, num_pages: int, num_rows: int, num_waiting: int
) -> int:
    """The number of reads of requests' fields in three selections over a batch of 4, after all arrivals."""
    pool = RequestPool(KVManager((num_pages,), 16, num_rows), vocab_size=9, max_model_len=64)
    scheduler = ChunkedScheduler(num_rows, 16, ordering_kind(name)(), n_workers=2)
    for n in range(4 + num_waiting):
        pool.add_request(str(n), [1, 2], SamplingParams(max_tokens=20), seed=0, arrival=float(n))
    counts: Counter[str] = Counter()

    def select(number: int) -> None:
        selection = scheduler.select(pool, pool.kv)
        make_plan(number, selection, pool, 0.0)

    select(0)
    with monkeypatch.context() as patched:
        for field in FIELDS:
            slot = getattr(Request, field)

            def read(self: Request, slot=slot, field=field):
                counts[field] += 1
                return slot.__get__(self)

            patched.setattr(Request, field, property(read, slot.__set__))
        for number in (1, 2, 3):
            select(number)
    return counts.total()


@pytest.mark.parametrize(
    ("num_pages", "num_rows"), [(64, 4), (4, 8)], ids=["for rows", "for pages"]
)
@pytest.mark.parametrize("name", ORDERINGS)
def test_thousands_that_wait_cost_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, num_pages: int, num_rows: int
) -> None:
    few, many = (num_reads(monkeypatch, name, num_pages, num_rows, number) for number in (10, 5000))
    assert 0 < many <= few + 8
