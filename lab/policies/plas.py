"""PLAS, program-level attained service (Luo et al., Autellix, arXiv 2502.13965, section 4.2).

A program is a sequence of calls, such as an agent's. Each new call has as its priority the service that earlier calls
of its program have got, so that short programs end first though no length is known. Calls of equal priority come in the
order of arrival.

The paper sorts calls into discrete queues by this service, with a quantum each, and a call that uses up its quantum
moves down; here `quanta` are the bounds of these queues, and service is counted in processed tokens and not in seconds.
`tenant` names the program. With one call in each program and one token as the quantum it is least attained service.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Plas:
    """The program with the least attained service first.

    Args:
        quanta: bounds of the queues, in tokens of a program, ascending; None: every token counts.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"tenant"})
    may_starve: ClassVar[bool] = True
    preempts: ClassVar[bool] = True
    is_static: ClassVar[bool] = False

    def __init__(self, quanta: Sequence[int] | None = (256, 512, 1024, 2048, 4096, 8192)) -> None:
        self._quanta = quanta
        self._attained: dict[str, int] = defaultdict(int)  # tokens, by program

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """The queue of a job's program, or its service."""
        attained = self._attained[job.tenant]
        return (attained if self._quanta is None else bisect_right(self._quanta, attained),)

    def decide(self, view: PolicyView) -> Decision:
        """Run the calls of the first queues."""
        return view.in_order(self)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Count the service of a program."""
        self._attained[job.tenant] += num_tokens

    def ended(self, job: RequestView) -> None:
        """Does nothing: the program may go on."""
