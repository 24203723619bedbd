"""The fair ordering: equal service of tenants within its bound, shares of rows, and nothing saved up."""

from collections import Counter
from collections.abc import Iterable, Iterator

from orca_jax.sched.orderings.fair import FairShare
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.orderings.tenants import TenantQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.values.request import Urgency
from tests.run.examples import holds_for
from tests.sched.lab import Lab, Shape
from tests.sched.test_orderings import ONE, SIZES, live
from tests.sched.test_properties import EOS, PLAIN_ARRIVALS, serve


class Measured(FairShare):
    """Sums the service of each pair of tenants while both could have had a row and none was passed over.

    It also checks each newcomer: none has its share of rows while a tenant with less waits.
    """

    def __init__(self) -> None:
        super().__init__(max_idle=1)
        self.service: Counter[str] = Counter()
        self.worst = 0
        self._since: dict[tuple[str, str], int] = {}

    def queue(self) -> "MeasuredQueue":
        return MeasuredQueue(self)

    def measured(self, found: Iterable[Request], pool: RequestPool) -> Iterable[Request]:
        able = sorted({r.urgency.tenant for r in pool if r.row is None and not r.in_flight})
        gaps = {
            (one, other): self.service[one] - self.service[other]
            for one in able
            for other in able
            if one < other
        }
        self._since = {pair: self._since.get(pair, gap) for pair, gap in gaps.items()}
        self.worst = max(
            [self.worst, *(abs(gap - self._since[pair]) for pair, gap in gaps.items())]
        )
        return self._checked(found, pool)

    def _checked(self, found: Iterable[Request], pool: RequestPool) -> Iterator[Request]:
        rows = Counter(r.urgency.tenant for r in pool if r.row is not None)
        share = pool.kv.num_rows / len({r.urgency.tenant for r in pool if live(r)} | rows.keys())
        able = Counter(
            r.urgency.tenant for r in pool if r.row is None and not r.in_flight and live(r)
        )
        for request in found:
            tenant = request.urgency.tenant
            if rows[tenant] >= share:
                assert all(rows[other] >= share for other in +able), "a tenant with less waits"
            passed_over = {
                one
                for one in +able
                if self.service[one] < self.service[tenant] and rows[one] >= share
            }
            self._since = {
                pair: gap for pair, gap in self._since.items() if not passed_over & {*pair}
            }
            yield request
            rows[tenant] += 1
            able[tenant] -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        self.service[request.urgency.tenant] += num_tokens
        super().charge(request, num_tokens)


class MeasuredQueue(TenantQueue):
    """The queue of `Measured`."""

    def __init__(self, counters: Measured) -> None:
        super().__init__(counters)
        self.measured = counters.measured

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        return self.measured(super().waiting(pool), pool)


@holds_for(150, arrivals=PLAIN_ARRIVALS, **SIZES)
def test_shares_are_equal_within_the_bound(
    arrivals, max_bs: int, page_size: int, shape: Shape
) -> None:
    measured = Measured()
    pages = -(-(shape.num_pages or 0) // page_size)
    lab = Lab(
        max_bs=max_bs,
        page_size=page_size,
        eos=[EOS],
        shape=shape._replace(ordering=lambda: measured, num_pages=pages),
    )
    serve(lab, arrivals)
    longest = max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals)
    assert measured.worst <= 2 * max_bs * longest


def test_no_row_is_idle_for_the_shares_of_others() -> None:
    """Carl has less than its share and nothing that waits: ann and bob take what is left."""
    lab = Lab(max_bs=9, shape=ONE._replace(ordering=FairShare, budget=16))
    for name, count in {"ann": 5, "bob": 5, "carl": 1}.items():
        for number in range(count):
            lab.add(f"{name}{number}", 1, 4, Urgency(tenant=name))
    lab.step()
    (plan,) = lab.executor.plans
    assert Counter(member.request_id[:-1] for member in plan.members) == {
        "ann": 4,
        "bob": 4,
        "carl": 1,
    }
    lab.run()


def test_a_tenant_with_less_service_takes_no_more_rows_than_its_share() -> None:
    """Bob's prompts are longer, so that ann is always the one with less service."""
    lab = Lab(max_bs=4, shape=ONE._replace(ordering=FairShare, budget=64))
    for number in range(6):
        lab.add(f"ann{number}", 1, 1, Urgency(tenant="ann"))
        lab.add(f"bob{number}", 8, 1, Urgency(tenant="bob"))
    lab.run()
    rows = [
        Counter([member.request_id[:-1] for member in plan.members]) for plan in lab.executor.plans
    ]
    assert rows == [{"ann": 2, "bob": 2}] * 3


def served(lab: Lab, tenants: dict[str, str]) -> Iterator[tuple[int, int]]:
    """The service of ann and bob so far, after each iteration."""
    counts = Counter[str]()
    for plan in lab.executor.plans:
        for member in plan.members:
            counts[tenants[member.request_id]] += member.num_tokens
        yield counts["ann"], counts["bob"]


def flooded(ordering) -> int:
    """The largest difference of service while ann's forty and bob's forty requests wait; hers came first."""
    lab = Lab(max_bs=2, shape=ONE._replace(ordering=ordering))
    tenants = {f"{name}{number}": name for name in ("ann", "bob") for number in range(40)}
    for number, (request_id, tenant) in enumerate(tenants.items()):
        lab.add(request_id, 1 + number % 5, 3, Urgency(tenant=tenant))
    lab.run()
    total = max(ann for ann, _ in served(lab, tenants))
    return max(abs(ann - bob) for ann, bob in served(lab, tenants) if max(ann, bob) < total - 16)


def test_many_earlier_requests_of_a_tenant_do_not_starve_others() -> None:
    assert flooded(FairShare) <= 16, (
        "two rows of at most eight tokens: counters start equal, so the bound is once that"
    )
    assert flooded(FirstComeFirstServed) > 100, "otherwise this test shows nothing"


def test_an_idle_tenant_saves_nothing_up() -> None:
    """Bob arrives after much service of ann's requests. From then on they take turns; ann need not wait."""
    lab = Lab(max_bs=1, shape=ONE._replace(ordering=FairShare))
    tenants = {}
    for number in range(60):
        if number == 30:
            while len(lab.ends) < 25:
                lab.step()
        name = "ann" if number < 40 else "bob"
        tenants[f"{name}{number}"] = name
        lab.add(f"{name}{number}", 2, 1, Urgency(tenant=name))
    lab.run()
    assert (
        "".join(tenants[batch[:-1]][0] for batch in lab.batches) == "a" * 25 + "ba" * 15 + "b" * 5
    )


def test_unused_names_are_forgotten() -> None:
    ordering = FairShare(max_idle=10)
    lab = Lab(max_bs=2, shape=ONE._replace(ordering=lambda: ordering))
    for number in range(500):
        lab.add(f"{number}", 1, 1, Urgency(tenant=f"tenant {number}"))
        lab.step()
    queue = lab.scheduler.inner.queue
    assert len(ordering._served) < 50 and len(queue._turns) < 100
