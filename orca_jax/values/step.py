"""The contract between scheduling and computing: `StepPlan` goes down, `StepResult` comes up.

Schedulers decide plans and executors run them; neither imports the other. A plan is a plain value: it can be written
to a socket, replayed, or run by a simulator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, overload

from orca_jax.values.request import SamplingParams, TokenLogprobs, TokenSet

NOT_FINITE = (
    "the model's logits were not finite (NaN or infinity), so no further token could be chosen"
)
"""The error of a request with sound parameters; every other error follows from the request's own parameters."""


DIGEST_BYTES = 32  # of SHA-256


class VectorSpan(NamedTuple):
    """Consecutive tokens of a prompt that stand for vectors from the front end, such as those of an image.

    Each token has an id too, which the vector replaces in the first layer.

    Attributes:
        place: the position of its first token. In a part of a prompt it counts from the begin of the part, and is
            negative if the span begins before it.
        length: the number of its tokens, and of its vectors.
        digest: SHA-256 of what the vectors follow from: spans of one digest and one length have equal vectors.
        key: the name of the vectors in the front end.
    """

    place: int
    length: int
    digest: bytes
    key: str

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.place + self.length


@dataclass(frozen=True, slots=True)
class SpannedPrompt(Sequence[int]):
    """A prompt with vector spans, or a part of one: the sequence of its ids. Plain ids are a prompt without spans.

    A slice has the spans that touch it, and is a list if there are none.

    Attributes:
        ids: the id of each token.
        spans: its vector spans, in order and without overlap.
    """

    ids: tuple[int, ...]
    spans: tuple[VectorSpan, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "list[int] | SpannedPrompt": ...

    def __getitem__(self, index: int | slice) -> "int | list[int] | SpannedPrompt":
        if not isinstance(index, slice):
            return self.ids[index]
        start, stop, step = index.indices(len(self.ids))
        assert step == 1, f"a part of a prompt is consecutive, not every {step}-th token"
        spans = tuple(
            span._replace(place=span.place - start)
            for span in self.spans
            if max(span.place, start) < min(span.end, stop)
        )
        if not spans:
            return list(self.ids[index])
        return SpannedPrompt(self.ids[index], spans)

    def __add__(self, ids: Sequence[int]) -> "SpannedPrompt":
        """The tokens followed by plain ones."""
        return SpannedPrompt((*self.ids, *ids), self.spans)

    @property
    def fault(self) -> str:
        """The reason for which these spans are not those of a whole prompt; empty if they are."""
        end = 0
        for span in self.spans:
            if len(span.digest) != DIGEST_BYTES:
                return (
                    f"the digest of a vector span has {DIGEST_BYTES} bytes, not {len(span.digest)}"
                )
            if span.length < 1 or span.place < end or span.end > len(self.ids):
                return (
                    f"a vector span of {span.length} tokens from position {span.place} on is not within the positions "
                    f"from {end} to {len(self.ids)}"
                )
            end = span.end
        return ""


def spans_of(ids: Sequence[int]) -> tuple[VectorSpan, ...]:
    """The vector spans of a prompt or of a part of one; () for plain ids."""
    if type(ids) is SpannedPrompt:  # `isinstance` of a Sequence takes ten times as long
        return ids.spans
    return ()


class RowSampling(NamedTuple):
    """The sampling of a request that now holds a row; sent when the row gets a new holder.

    The parameters act in this order: bias, penalties, mask, temperature, top-k, top-p, min-p. Executors read no other
    fields of `params`.
    """

    params: SamplingParams
    seed: int  # 64 bits; resolved, while `params.seed` may be None
    num_prompt: int = 0  # tokens of the context that were not generated
    slot: int = 0  # of the request's adapter on the devices; 0: no adapter


Pools = Literal["last", "sum", "mean"]
"""The use of a member's hidden vectors for the embedding of its request.

"last" returns the vector of the last token. "sum" adds the vectors to the sum of the row, which begins at position 0.
"mean" does so for the last tokens of a prompt, and returns the mean.
"""


class StateMove(NamedTuple):
    """The blocks of recurrent states of a member: the iteration reads `source` and writes `target` (`cache_spec`).

    They are equal if nothing else needs the state before the iteration. `source` is `NO_BLOCK` at position 0: the
    states begin as zeros. No target is the source of another member of the plan, and each is that of one member.
    """

    source: int
    target: int


class Member(NamedTuple):
    """The work of one request in one iteration.

    It processes `num_tokens` tokens from position `start`. `ids` are the ids known to the host, in order; a
    `SpannedPrompt` if vector spans touch them, with places from `start` on. If `last_on_device` holds, one more id
    follows: the executor has it in `last_token[row]`. So `num_tokens == len(ids) + last_on_device`. The context after
    the iteration is `start + num_tokens` tokens.

    Blocks are sent once (`cache_spec`): `new_blocks` were allocated since the member's last plan, as many in each
    group of layers, and follow the row's first `num_old_blocks` of the group. Blocks that the row gave back count. An
    entry that the row never had, before the window of a prefix hit, is `NO_BLOCK`. `new_blocks` is empty if there are
    none. `sampling` is set when the row has a new holder, also after preemption.
    A member samples only if its last token is the newest of its request; an earlier chunk of a prompt does not.
    A sampling member with `is_constrained` waits for its set of allowed ids, passed by `Executor.constrain`.

    `targets` requests log probabilities of known ids: the i-th one given the context up to the member's i-th
    token. They are the following ids, so there are `num_tokens` of them, or one fewer if the member samples.

    The last `num_drafts` of `ids` are proposals for the next ids (speculation). This member samples after its newest
    token and after each proposal. Such a member has no targets, no constraint and no id on the device. Its result is
    the accepted proposals and one more drawn id. The keys and values of the other proposals have no meaning: a later
    plan starts before them.
    """

    request_id: str
    row: int
    start: int
    ids: Sequence[int] | SpannedPrompt
    is_sampling: bool
    last_on_device: bool = False
    num_old_blocks: int = 0
    new_blocks: Sequence[Sequence[int]] = ()  # by group
    sampling: RowSampling | None = None
    is_constrained: bool = False
    targets: Sequence[int] = ()
    num_top_targets: int = 0  # most probable tokens to report for each target
    num_drafts: int = 0  # proposals at the end of `ids`
    pools: Pools | None = None  # of a request with `pooling`
    state: StateMove | None = None  # None: no layer of the model has a state

    @property
    def num_tokens(self) -> int:
        """Tokens of this member in the merged batch."""
        return len(self.ids) + self.last_on_device


_new = tuple.__new__
_OTHERS = tuple(Member._field_defaults[name] for name in Member._fields[8:])


def plain_member(
    request_id: str,
    row: int,
    start: int,
    ids: Sequence[int],
    is_sampling: bool,
    last_on_device: bool,
    num_old_blocks: int,
    new_blocks: Sequence[Sequence[int]],
) -> Member:
    """A member whose other fields have their defaults. Nearly all have, and this is quicker than `Member(...)`."""
    own = (request_id, row, start, ids, is_sampling, last_on_device, num_old_blocks, new_blocks)
    return _new(Member, own + _OTHERS)


class BlockCopy(NamedTuple):
    """A block to copy before an iteration: the first own block of a row, which begins as one in the prefix cache does.

    The copy has all pages of the block. The row continues within its tokens.
    """

    group: int  # of layers
    source: int  # a block of the group's pool
    target: int  # another one; no source of the same plan


class SlotWrite(NamedTuple):
    """An adapter to write into a slot before an iteration. No row of an earlier holder of the slot is left."""

    slot: int  # from 1
    adapter: str  # key of the weights in the executor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. Each row occurs once, and a plan is never empty."""

    iteration: int
    members: tuple[Member, ...]
    writes: tuple[SlotWrite, ...] = ()  # adapters of newcomers
    copies: tuple[BlockCopy, ...] = ()  # after all earlier iterations, and before this one writes

    @property
    def num_tokens(self) -> int:
        """T before padding."""
        return sum(member.num_tokens for member in self.members)

    @property
    def is_constrained(self) -> bool:
        """True if sampling waits for `Executor.constrain`."""
        return any([member.is_constrained for member in self.members])

    @property
    def has_unknown_context(self) -> bool:
        """True if the last token of a constrained member is on the device; its allowed ids are then unknown."""
        return any(member.is_constrained and member.last_on_device for member in self.members)


class MemberResult(NamedTuple):
    """The result of one member of a plan."""

    # its new ids, in order; () without sampling, several with accepted proposals
    run: Sequence[int] = ()
    is_finite: bool = True  # False: the logits held NaN or infinity, and the last id is undefined
    logprobs: TokenLogprobs | None = None  # of the last id, if requested
    scores: Sequence[TokenLogprobs] = ()  # one for each of its targets
    # with `pools` "last" or "mean": the vector as float32 in the machine's order
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan, member by member in the plan's order."""

    iteration: int
    members: Sequence[MemberResult]

    @property
    def token_ids(self) -> list[int]:
        """The last reported id of each sampling member."""
        return [member.run[-1] for member in self.members if member.run]


@dataclass(slots=True)
class ExecutorStats:
    """Totals since start; an executor owns and updates its own."""

    iterations: int = 0
    # device programs run; more than iterations if a plan exceeds the largest bucket
    launches: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    compiles: int = 0
    compiles_while_serving: int = 0
    pack_seconds: float = 0.0
    dispatch_seconds: float = 0.0  # time to start device programs; synchronous on some backends
    wait_seconds: float = 0.0  # in `collect`
    # upper bound of the device's time without work between `submit` and `rest`
    idle_seconds: float = 0.0


Handle = object
"""An iteration in flight. Only its executor reads it."""


class Executor(Protocol):
    """Runs plans in the order of submission."""

    stats: ExecutorStats

    @property
    def expected_seconds(self) -> float:
        """Time that everything submitted and not collected should take, from measurements at start."""
        ...

    def submit(self, plan: StepPlan) -> Handle:
        """Start an iteration and return at once."""
        ...

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Send the allowed ids of the constrained members of a plan: one set for each, in the plan's order, none empty.

        Must follow `submit` of a constrained plan, before the next `submit` and before `collect` of this plan. The plan
        before it may be collected first. The layers are already running meanwhile.
        """
        ...

    def is_ready(self, handle: Handle) -> bool:
        """True if `collect` would not wait for the device."""
        ...

    def wait(self, handle: Handle) -> None:
        """Wait until `is_ready`, or until the iteration has failed; any thread may call it, once for a handle."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Wait for an iteration and return its result; handles are collected in the order of submission."""
        ...

    def rest(self) -> None:
        """Stop counting idle time until the next plan: everything is collected and there is no work."""
        ...

    def close(self) -> None:
        """Free device memory; the executor is unusable afterwards."""
        ...
