"""VTC, the virtual token counter: fairness among clients (Sheng et al., OSDI'24, arXiv 2401.00588, section 4).

Algorithm 2: every client has a counter of the service it got, w_p for each prompt token and w_q for each generated
one. A free place goes to the waiting client with the lowest counter, whose prompt is charged at once; generated tokens
are charged as they come. A client that returns is lifted to the lowest counter among the waiting ones, or to that of
the client that waited last, so that an idle time earns nothing.

Theorem 4.4: two clients that always have requests waiting differ in service by at most 2 max(w_p L_input, w_q M), with
the longest prompt L_input and the most tokens M of a batch in memory. The paper's experiments have w_p = 1, w_q = 2.

Prompts are charged once, also if they are computed again after an eviction. The paper's engine computes a prompt in
one iteration; here it may take several, which changes no charge.
"""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class VirtualTokenCounter:
    """The client with the least service first.

    Args:
        w_p: charge for each token of a prompt.
        w_q: charge for each generated token.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"tenant"})
    may_starve: ClassVar[bool] = False
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = False

    def __init__(self, w_p: float = 1, w_q: float = 2) -> None:
        self.w_p = w_p
        self.w_q = w_q
        self.counters: dict[str, float] = {}
        self._waiting: set[str] = set()  # clients with a waiting request, at the last decision
        self._last = ""  # the latest client to leave this set
        self._places: dict[int, float] = {}  # of waiting jobs

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """Residents by arrival, then waiting jobs: each by the counter that its client has after its earlier ones."""
        return (0.0,) if job.is_resident else (1.0, self._places[job.index])

    def decide(self, view: PolicyView) -> Decision:
        """Lift returning clients, and choose within the order of the counters."""
        waiting = list(view.waiting)
        self._lift({job.tenant for job in waiting})
        charged = dict(self.counters)
        self._places = {}
        for job in waiting:
            self._places[job.index] = charged[job.tenant]
            if not job.num_evictions:
                charged[job.tenant] += self.w_p * job.num_prompt
        return view.in_order(self)

    def _lift(self, clients: set[str]) -> None:
        for client in clients - self._waiting:
            others = [self.counters[each] for each in self._waiting & clients]
            least = min(others, default=self.counters.get(self._last, 0.0))
            self.counters[client] = max(self.counters.get(client, 0.0), least)
        self._last = max(
            self._waiting - clients,
            key=lambda each: (self.counters[each], each),
            default=self._last,
        )
        self._waiting = clients

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Charge the prompt at admission, and each token that is drawn."""
        if not job.is_resident and not job.num_evictions:
            self.counters[job.tenant] += self.w_p * job.num_prompt
        if num_tokens == job.num_left:
            self.counters[job.tenant] += self.w_q

    def ended(self, job: RequestView) -> None:
        """Does nothing: counters stay."""
