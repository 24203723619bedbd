"""What every scheduler is: it decides who runs next, and nothing else."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from orca_jax.request import Request
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool


class Choice(NamedTuple):
    """A request that runs in the next iteration, and how many of its tokens are processed.

    A request that ended but keeps its place repeats its last processed tokens. Where the iteration is repeated,
    `most_steps` and `told` are as in `step.Member`.
    """

    request: Request
    num_tokens: int
    most_steps: int = 1
    told: bool = True


class Selection(NamedTuple):
    """Who runs in the next iteration, and who gives up row and pages for that; empty when nobody can run.

    `num_steps` and `yields` are as in `step.StepPlan`.
    """

    choices: Sequence[Choice]
    preempted: Sequence[Request] = ()
    num_steps: int = 1
    yields: bool = False


class Scheduler(Protocol):
    """Decides; admission, accounting and finishing exist once, in `planner` and `pool`."""

    name: str
    n_workers: int  # iterations that may be in flight

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Decide. Changes neither `pool` nor `kv`."""
        ...

    def may_return(self, request: Request) -> bool:
        """Whether what a request has generated may be handed out now."""
        ...
