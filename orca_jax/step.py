"""The contract between thinking and computing: `StepPlan` goes down, `StepResult` comes up.

Schedulers write plans, executors run them, and neither knows the other. A plan is a plain value: it can be
written to a socket, replayed, or run by a simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the request that now holds a row; sent when the row changes hands."""

    temperature: float
    top_k: int  # 0: all
    top_p: float
    seed: int  # 64 bits


class Member(NamedTuple):
    """What one request does in one iteration.

    It processes `num_tokens` tokens from position `start`. `ids` are the ones the host knows, in order; where
    `last_on_device` holds, one more follows that the executor still has in `last_token[row]`, so that
    `num_tokens == len(ids) + last_on_device`. The context after the iteration is `start + num_tokens` tokens.

    Pages are told once: `new_pages` were given since the member's last plan and follow the row's first
    `num_old_pages` pages. `sampling` is set when the row has a new holder, also after preemption.
    Only a member whose last token is the newest of its request samples; a prompt's earlier chunk does not.
    """

    request_id: str
    row: int
    start: int
    ids: Sequence[int]
    samples: bool
    last_on_device: bool = False
    num_old_pages: int = 0
    new_pages: Sequence[int] = ()
    sampling: RowSampling | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this member in the merged batch."""
        return len(self.ids) + self.last_on_device


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. A row stands in it once, and it is never empty."""

    iteration: int
    members: tuple[Member, ...]

    @property
    def num_tokens(self) -> int:
        """T before padding."""
        return sum(member.num_tokens for member in self.members)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back, for each sampling member in the plan's order."""

    iteration: int
    token_ids: Sequence[int]
    finite: Sequence[bool]  # False: the logits held NaN or infinity and the token means nothing


@dataclass(slots=True)
class ExecutorStats:
    """Totals since start; an executor owns and updates its own."""

    iterations: int = 0
    launches: int = 0  # device programs run; more than iterations where a plan exceeds the largest bucket
    tokens: int = 0
    padding_tokens: int = 0
    compiles: int = 0
    compiles_while_serving: int = 0
    pack_seconds: float = 0.0
    dispatch_seconds: float = 0.0  # handing programs to the device, which some backends do synchronously
    wait_seconds: float = 0.0


Handle = object
"""An iteration in flight. Only its executor looks inside."""


class Executor(Protocol):
    """Runs plans in the order of submission."""

    stats: ExecutorStats

    def submit(self, plan: StepPlan) -> Handle:
        """Start an iteration and return at once."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration; handles are collected in the order of submission."""
        ...

    def close(self) -> None:
        """Free device memory; the executor is unusable afterwards."""
        ...
