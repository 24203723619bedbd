"""Check-in intervals: the number of iterations on the device between two checks of a request by the host.

An iteration of increments alone needs no decision until a request ends or a new one could be admitted. So the device
may run many steps by itself. The host checks short requests after each step, medium and long ones every K1 and K2 steps
only. The tokens drawn in between stay on the device until the request is due, or until it ends.
"""

from collections.abc import Sequence

from orca_jax.sched.kv import KVManager
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, Selection
from orca_jax.step import MAX_STOP_IDS, Limit, MultiStep

STRETCH = 4
"""A request is checked every K steps if its predicted rest is at least this many times K."""


class CheckIns:
    """Makes plans of many steps out of selections.

    Args:
        intervals: K1 and K2: steps between two checks of a medium and of a long request. The class follows from the
            predicted rest of its output, so a request is checked more often near its predicted end, and after each
            step once it is overdue.
    """

    def __init__(self, intervals: Sequence[int]) -> None:
        self._intervals = sorted(intervals, reverse=True)

    def interval(self, request: Request) -> int:
        """Steps between two checks of a request, as predicted now."""
        left = request.predicted_output - len(request.generated_ids)
        return next((k for k in self._intervals if left >= STRETCH * k), 1)

    def stretch(self, selection: Selection, kv: KVManager, num_waiting: int) -> Selection:
        """The selection extended to many steps, limited by the first member to be due and by free pages; or unchanged.

        Args:
            selection: with nothing in flight.
            kv: owns the pages.
            num_waiting: requests without a row; the first member to end makes room for one of them.
        """
        choices = selection.choices
        if selection.preempted or not all([_can_repeat(choice) for choice in choices]):
            return selection
        intervals = [self.interval(choice.request) for choice in choices]
        pairs = list(zip(choices, intervals, strict=True))
        num_steps = max(1, min([interval - choice.request.num_pending for choice, interval in pairs], default=1))
        num_steps = _fitting(choices, num_steps, kv)
        limits = [_limit(choice.request, num_steps, interval) for choice, interval in pairs]
        if num_steps == 1 and all([limit.reports for limit in limits]):
            return selection
        return selection._replace(multi_step=MultiStep(num_steps, stops_early=num_waiting > 0, limits=limits))


def _can_repeat(choice: Choice) -> bool:
    """True if the device can do the host's work between two iterations by itself."""
    request, params = choice.request, choice.request.params
    return (
        request.row is not None
        and choice.num_tokens == request.num_left == 1
        and request.num_computed >= len(request.prompt_ids)
        and request.constraint is None
        and not (params.has_penalty or params.logit_bias)
        and params.logprobs is None
        and len(request.stop_ids) <= MAX_STOP_IDS
    )


def _num_left(request: Request) -> int:
    """The rest of a request's `max_tokens`, less the tokens on the device."""
    return request.params.max_tokens - len(request.generated_ids) - request.num_pending


def _fitting(choices: Sequence[Choice], num_steps: int, kv: KVManager) -> int:
    """`num_steps`, or the largest half, quarter, ... with enough free pages; the pages of one step are always free."""
    while num_steps > 1:
        ends = [(c.request.row, c.request.num_computed + min(num_steps, _num_left(c.request))) for c in choices]
        if sum([kv.lacking(row, end) for row, end in ends]) <= kv.num_free_pages:
            break
        num_steps //= 2
    return num_steps


def _limit(request: Request, num_steps: int, interval: int) -> Limit:
    num_left = _num_left(request)
    report = request.num_pending + num_steps >= interval or num_steps >= num_left
    return Limit(min(num_steps, num_left), report)
