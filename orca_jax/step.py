"""The contract between scheduling and computing: `StepPlan` goes down, `StepResult` comes up.

Schedulers decide plans and executors run them; neither imports the other. A plan is a plain value: it can be written
to a socket, replayed, or run by a simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orca_jax.request import SamplingParams, TokenLogprobs, TokenSet

MAX_STOP_IDS = 8  # end tokens that a device can compare with by itself; a shape of the programs of many steps

NOT_FINITE = "the model's logits were not finite (NaN or infinity), so no further token could be chosen"
"""The error of a request with sound parameters; every other error follows from the request's own parameters."""


def has_penalty(params: SamplingParams) -> bool:
    """True if logits depend on the tokens of the context."""
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1


class RowSampling(NamedTuple):
    """The sampling of a request that now holds a row; sent when the row gets a new holder.

    The parameters act in this order: bias, penalties, mask, temperature, top-k, top-p, min-p. Executors read no other
    fields of `params`.
    """

    params: SamplingParams
    seed: int  # 64 bits; resolved, while `params.seed` may be None
    num_prompt: int = 0  # tokens of the context that were not generated
    stop_ids: tuple[int, ...] = ()  # end tokens of the request, for plans of many steps

    @property
    def has_extras(self) -> bool:
        """True if the request needs the full sampler, which costs the whole launch some time."""
        params = self.params
        return has_penalty(params) or bool(params.logit_bias) or params.logprobs is not None


class Member(NamedTuple):
    """The work of one request in one iteration.

    It processes `num_tokens` tokens from position `start`. `ids` are the ids known to the host, in order. If
    `last_on_device` holds, one more id follows: the executor has it in `last_token[row]`. So
    `num_tokens == len(ids) + last_on_device`. The context after the iteration is `start + num_tokens` tokens.

    Pages are sent once: `new_pages` were allocated since the member's last plan and follow the row's first
    `num_old_pages` pages. `sampling` is set when the row has a new holder, also after preemption.
    A member samples only if its last token is the newest of its request; an earlier chunk of a prompt does not.
    A sampling member with `is_constrained` waits for its set of allowed ids, which `Executor.constrain` passes.

    `targets` requests log probabilities of known ids: the i-th one given the context up to the member's i-th
    token. They are the following ids, so there are `num_tokens` of them, or one fewer if the member samples.
    """

    request_id: str
    row: int
    start: int
    ids: Sequence[int]
    is_sampling: bool
    last_on_device: bool = False
    num_old_pages: int = 0
    new_pages: Sequence[int] = ()
    sampling: RowSampling | None = None
    is_constrained: bool = False
    targets: Sequence[int] = ()
    num_top_targets: int = 0  # most probable tokens to report for each target

    @property
    def num_tokens(self) -> int:
        """Tokens of this member in the merged batch."""
        return len(self.ids) + self.last_on_device


class Limit(NamedTuple):
    """The part of one member in a plan of many steps."""

    most_steps: int = 1  # tokens that the member may generate in the plan
    report: bool = True  # False: the tokens stay on the device, unless the member ends; a later result carries them


class MultiStep(NamedTuple):
    """Many iterations of the same members in one dispatch (`--check-in-intervals`).

    Every member processes one token and samples, plainly, and the device feeds the drawn token to the next step. A
    member ends with one of its `stop_ids` or with logits that are not finite; it stops then, or after its
    `most_steps`. The dispatch returns after `num_steps` steps, when all members have stopped, or, with
    `stops_early`, when the first one has. Members with `report=False` have the `most_steps` of the whole dispatch.
    """

    num_steps: int
    stops_early: bool  # True: a waiting request needs the row or the pages of the first member to end
    limits: Sequence[Limit]  # of the plan's members, in their order


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, or many steps of it in one dispatch. Each row occurs once, and a plan is never empty.

    A plan with `multi_step` must be submitted with no other plan in flight.
    """

    iteration: int
    members: tuple[Member, ...]
    multi_step: MultiStep | None = None  # None in nearly all plans

    @property
    def num_tokens(self) -> int:
        """T before padding."""
        return sum(member.num_tokens for member in self.members)

    @property
    def is_constrained(self) -> bool:
        """True if sampling waits for `Executor.constrain`."""
        return any(member.is_constrained for member in self.members)

    @property
    def has_unknown_context(self) -> bool:
        """True if the last token of a constrained member is on the device, so that its allowed ids are unknown yet."""
        return any(member.is_constrained and member.last_on_device for member in self.members)


class MultiStepResult(NamedTuple):
    """Tokens of many steps, for each sampling member in the plan's order."""

    num_steps: int  # steps that were run
    runs: Sequence[Sequence[int] | None]  # all unreported ids of the member, in order; None if they stay on the device


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan, for each sampling member in the plan's order.

    `logprobs` is empty if no member requested any. `scores` holds, for each member with targets in the plan's order,
    one entry for each target.

    `multi_step` is None, unless the plan had many steps or an earlier one left tokens on the device. `token_ids` are
    then the last of each run, and undefined beside a None.
    """

    iteration: int
    token_ids: Sequence[int]
    finite: Sequence[bool]  # False: the logits held NaN or infinity, and the token is undefined
    logprobs: Sequence[TokenLogprobs | None] = ()
    scores: Sequence[Sequence[TokenLogprobs]] = ()
    multi_step: MultiStepResult | None = None


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
    idle_seconds: float = 0.0  # for which the device had nothing to do between `submit` and `rest`, at most


Handle = object
"""An iteration in flight. Only its executor looks inside."""


class Executor(Protocol):
    """Runs plans in the order of submission."""

    stats: ExecutorStats

    def submit(self, plan: StepPlan) -> Handle:
        """Start an iteration and return at once."""
        ...

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Say what the constrained members of a plan may draw, one set for each in the plan's order, none empty.

        Must follow `submit` of a constrained plan before the next one is submitted and before this one is collected;
        the one before it may be collected first. The layers are already running meanwhile.
        """
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration; handles are collected in the order of submission."""
        ...

    def rest(self) -> None:
        """Everything is collected and there is no work; until the next plan the device is not idle but not wanted."""
        ...

    def close(self) -> None:
        """Free device memory; the executor is unusable afterwards."""
        ...
