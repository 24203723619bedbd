"""Check-in intervals: how many iterations the device runs before the host looks again.

An iteration in which everybody generates needs no decision until somebody ends or somebody new wants in. So the device
may repeat it by itself, and the host looks at short requests after each, at medium and long ones every K1 and K2
iterations only. What a request drew in between stays on the device until its class is due, or until it ends.
"""

from collections.abc import Sequence

from orca_jax.request import Request
from orca_jax.sched.kv import KVManager
from orca_jax.sched.scheduler import Choice, Selection
from orca_jax.step import MAX_STOP_IDS, has_penalty

STRETCH = 4
"""A class is looked at every K iterations if its requests are thought to have at least this many times K to go."""


class CheckIns:
    """Makes repetitions of selections where it can.

    Args:
        intervals: K1 and K2: iterations between two looks at a medium and at a long request. What is predicted is how
            much a request has to go, so it is looked at more often the nearer its end is thought to be, and after each
            iteration once it is overdue.
    """

    def __init__(self, intervals: Sequence[int]) -> None:
        self._intervals = sorted(intervals, reverse=True)

    def interval(self, request: Request) -> int:
        """Iterations between two looks at a request, as things stand."""
        left = request.predicted_output - len(request.generated_ids)
        return next((k for k in self._intervals if left >= STRETCH * k), 1)

    def stretch(self, selection: Selection, kv: KVManager, num_waiting: int) -> Selection:
        """The same selection repeated until the first member is due, as far as pages reach; or as it is.

        Args:
            selection: with nothing in flight.
            kv: where the pages come from.
            num_waiting: requests without a row; the first member to end lets one of them in.
        """
        choices = selection.choices
        if selection.preempted or not all([_can_repeat(choice) for choice in choices]):
            return selection
        intervals = [self.interval(choice.request) for choice in choices]
        pairs = list(zip(choices, intervals, strict=True))
        num_steps = max(1, min([interval - choice.request.num_pending for choice, interval in pairs], default=1))
        num_steps = _payable(choices, num_steps, kv)
        stretched = [_repeated(choice, num_steps, interval) for choice, interval in pairs]
        if num_steps == 1 and all([choice.told for choice in stretched]):
            return selection
        return Selection(stretched, (), num_steps, yields=num_waiting > 0)


def _can_repeat(choice: Choice) -> bool:
    """Whether the device can do by itself what the host would do between two iterations."""
    request, params = choice.request, choice.request.params
    return (
        request.row is not None
        and choice.num_tokens == request.num_left == 1
        and request.num_computed >= len(request.prompt_ids)
        and request.constraint is None
        and not (has_penalty(params) or params.logit_bias)
        and params.logprobs is None
        and len(request.stop_ids) <= MAX_STOP_IDS
    )


def _num_left(request: Request) -> int:
    """Tokens that it may still generate."""
    return request.params.max_tokens - len(request.generated_ids) - request.num_pending


def _payable(choices: Sequence[Choice], num_steps: int, kv: KVManager) -> int:
    """The largest half, quarter, ... of `num_steps` whose pages are free; one step's are, or it were not chosen."""
    while num_steps > 1:
        ends = [(c.request.row, c.request.num_computed + min(num_steps, _num_left(c.request))) for c in choices]
        if sum([kv.lacking(row, end) for row, end in ends]) <= kv.num_free_pages:
            break
        num_steps //= 2
    return num_steps


def _repeated(choice: Choice, num_steps: int, interval: int) -> Choice:
    request, num_left = choice.request, _num_left(choice.request)
    told = request.num_pending + num_steps >= interval or num_steps >= num_left
    return choice._replace(most_steps=min(num_steps, num_left), told=told)
