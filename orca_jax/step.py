"""The contract between thinking and computing: `StepPlan` goes down, `StepResult` comes up.

Schedulers write plans, executors run them, and neither knows the other. A plan is a plain value: it can be
written to a socket, replayed, or run by a simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAX_LOGPROBS = 20  # most probable tokens that a request may ask to see; a shape of the compiled sampler
MAX_LOGIT_BIAS = 300  # ids that a request may bias; OpenAI's limit, and a shape of the compiled sampler
MAX_STOP_IDS = 8  # end tokens that a device can look for by itself; a shape of the compiled repetitions

NOT_FINITE = "the model's logits were not finite (NaN or infinity), so no further token could be chosen"
"""Why a request ends that is not to blame; every other reason is what the request asked for."""

TokenSet = int
"""A set of token ids as the bits of an integer: bit i is id i."""


class TokenLogprobs(NamedTuple):
    """One token under the model's own distribution: before temperature, filters, penalties, biases and masks."""

    logprob: float
    rank: int  # tokens that are more probable, plus one
    top_ids: tuple[int, ...] = ()  # the most probable ones, as many as were asked for, best first
    top_logprobs: tuple[float, ...] = ()


class Penalties(Protocol):
    """What `SamplingParams` and `RowSampling` have in common here."""

    @property
    def presence_penalty(self) -> float: ...

    @property
    def frequency_penalty(self) -> float: ...

    @property
    def repetition_penalty(self) -> float: ...


def has_penalty(sampling: Penalties) -> bool:
    """Whether logits depend on which tokens the context holds."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the request that now holds a row; sent when the row changes hands.

    What the fields mean is said at `SamplingParams`. They act in this order: bias, penalties, mask, temperature,
    top-k, top-p, min-p.
    """

    temperature: float
    top_k: int  # 0: all
    top_p: float
    seed: int  # 64 bits
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_prompt: int = 0  # tokens of the context that were not generated
    logprobs: int | None = None  # None: not wanted; else how many of the most probable tokens
    stop_ids: tuple[int, ...] = ()  # that end the request: for a device that repeats an iteration by itself

    @property
    def has_extras(self) -> bool:
        """Whether more than temperature, filters and seed is asked for, which costs the whole launch some time."""
        return has_penalty(self) or bool(self.logit_bias) or self.logprobs is not None


class Member(NamedTuple):
    """What one request does in one iteration.

    It processes `num_tokens` tokens from position `start`. `ids` are the ones the host knows, in order; where
    `last_on_device` holds, one more follows that the executor still has in `last_token[row]`, so that
    `num_tokens == len(ids) + last_on_device`. The context after the iteration is `start + num_tokens` tokens.

    Pages are told once: `new_pages` were given since the member's last plan and follow the row's first
    `num_old_pages` pages. `sampling` is set when the row has a new holder, also after preemption.
    Only a member whose last token is the newest of its request samples; a prompt's earlier chunk does not.
    A sampling member that `is_constrained` waits for its set of allowed ids, which comes by `Executor.constrain`.

    Where the plan repeats, `most_steps` is how many tokens the member may generate in it. A member that is not `told`
    keeps them on the device, unless it ends there, and the result of a later plan brings them; its `most_steps` are all
    of the plan's.

    `targets` asks for log probabilities of known ids: the i-th one's, given the context up to the member's i-th
    token. They are the ids that follow, so there are `num_tokens` of them, or one fewer where the member samples.
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
    is_constrained: bool = False
    targets: Sequence[int] = ()
    num_top_targets: int = 0  # most probable tokens to be told for each target
    most_steps: int = 1
    told: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of this member in the merged batch."""
        return len(self.ids) + self.last_on_device


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, or several of the same members in one dispatch. A row stands in it once, and it is never empty.

    With `num_steps` above 1, or a member that is not told, it repeats: every member processes one token and samples,
    plainly, and the device feeds what was drawn to the next repetition, at most `num_steps` times, until all have
    stopped or, where it `yields`, the first has. A member ends with one of its `stop_ids` or with logits that are not
    finite, and stops then or after `most_steps`. The plan must be submitted with nothing else in flight.
    """

    iteration: int
    members: tuple[Member, ...]
    num_steps: int = 1
    yields: bool = False  # somebody waits for what the first to end gives back

    @property
    def num_tokens(self) -> int:
        """T before padding."""
        return sum(member.num_tokens for member in self.members)

    @property
    def is_constrained(self) -> bool:
        """Whether sampling waits for `Executor.constrain`."""
        return any(member.is_constrained for member in self.members)

    @property
    def repeats(self) -> bool:
        """Whether the device feeds its own tokens on, or keeps some of them for later."""
        return self.num_steps > 1 or not all([member.told for member in self.members])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back, for each sampling member in the plan's order.

    `logprobs` is empty where no member wanted any. `scores` holds, for each member with targets in the plan's order,
    one entry for each target.

    `runs` is empty unless the plan repeats or an earlier one left tokens on the device. It then holds all ids that a
    member generated and nobody was told of, in order, or None where they stay there and the member has not ended;
    `token_ids` are the last of each, and mean nothing beside a None.
    """

    iteration: int
    token_ids: Sequence[int]
    finite: Sequence[bool]  # False: the logits held NaN or infinity and the token means nothing
    logprobs: Sequence[TokenLogprobs | None] = ()
    scores: Sequence[Sequence[TokenLogprobs]] = ()
    num_steps: int = 1  # how often a plan that repeats was run
    runs: Sequence[Sequence[int] | None] = ()


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
