"""Why tokens of a prompt were computed again: the most similar earlier prompt, and the first difference of the two.

Only prompts of one API key, salt and adapter are compared, so no answer says anything about those of others.
"""

import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, zip_longest

from orca_jax.serve.openai.asked import Asked, TemplatePrompt, TemplateTool
from orca_jax.serve.openai.errors import named
from orca_jax.serve.openai.schema.answers import CacheExplanation
from orca_jax.values.request import RequestUpdate

MOST_PROMPTS = 32  # of one group: a new one is compared with them
MOST_TOKENS = 4_000_000  # of all groups, of 4 bytes each
MOST_SHOWN = 32  # explanations for one key

type PromptGroup = tuple[str | None, str, str | None]
"""API key, salt and adapter of a prompt."""
type PartDigest = tuple[str, bytes]
"""The name of a part of a call, and a digest of its content."""


@dataclass(eq=False, slots=True)
class Seen:
    """A prompt beside the most similar earlier one.

    Attributes:
        id: of the answer.
        ids: its tokens.
        parts: of the call, in the order of most chat templates.
        requests: ids of its requests of the engine.
        name: returns the text of a token.
        at: seconds on the clock of the prompts.
        earlier: id of the answer to the other prompt; None if no prompt begins with the same token.
        ago: seconds between the two.
        shared: tokens at the begin of both.
        part: the first different part of the call.
        tokens: the first different one, and its counterpart in the other prompt.
        cached: tokens in the cache; None until the engine has begun.
        lost: the first page that the cache lacked: the seconds since it was given up, and the request that needed room.
        known: the prompts of its group.
    """

    id: str
    ids: "array[int]"
    parts: Sequence[PartDigest]
    requests: frozenset[str]
    name: Callable[[int], str]
    at: float = 0.0
    earlier: str | None = None
    ago: float = 0.0
    shared: int = 0
    part: str | None = None
    tokens: tuple[str | None, str | None] = (None, None)
    cached: int | None = None
    lost: tuple[float, str | None] | None = None
    known: "deque[Seen]" = field(default_factory=deque)

    def explanation(self) -> CacheExplanation:
        """The reason why tokens of the prompt were computed."""
        return _explained(self, tuple(self.known))

    def take_update(self, update: RequestUpdate) -> None:
        """Note what the engine has found in the cache; the first update counts."""
        if self.cached is None:
            self.cached = update.num_cached
            self.lost = update.lost

    def meet(self, other: "Seen") -> None:
        """Compare with an earlier prompt, and keep what both share if no other one shares more."""
        ids = self.ids
        least = max(1, self.shared)
        if ids[:least] != other.ids[:least]:
            return  # nearly always
        self.shared = shared = _num_shared(ids, other.ids, least)
        self.earlier = other.id
        self.ago = self.at - other.at
        self.part = _first_difference(self.parts, other.parts)
        ours = self.name(ids[shared]) if shared < len(ids) else None
        theirs = self.name(other.ids[shared]) if shared < len(other.ids) else None
        self.tokens = ours, theirs


@dataclass(eq=False)
class SeenPrompts:
    """The recent prompts of a server, by group. Threads may call its methods.

    Args:
        clock: seconds, monotonic.
    """

    clock: Callable[[], float] = time.monotonic
    _groups: OrderedDict[PromptGroup, deque[Seen]] = field(default_factory=OrderedDict)
    _num_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_prompt(self, group: PromptGroup, seen: Seen) -> None:
        """Compare a prompt with the earlier ones of its group, and keep it for later ones."""
        with self._lock:
            seen.at = self.clock()
            known = seen.known = self._groups.setdefault(group, deque())
            self._groups.move_to_end(group)
            for other in known:
                seen.meet(other)
            known.append(seen)
            self._num_tokens += len(seen.ids)
            if len(known) > MOST_PROMPTS:
                self._drop(group)
            while self._num_tokens > MOST_TOKENS:
                self._drop(next(iter(self._groups)))

    def of_key(self, caller: str | None) -> list[CacheExplanation]:
        """Explanations of the last prompts of an API key that the engine has begun, the newest one first."""
        with self._lock:
            groups = [known for group, known in self._groups.items() if group[0] == caller]
        found = [seen for seen in chain.from_iterable(groups) if seen.cached is not None]
        found.sort(key=lambda seen: -seen.at)
        return [seen.explanation() for seen in found[:MOST_SHOWN]]

    def _drop(self, group: PromptGroup) -> None:
        known = self._groups[group]
        self._num_tokens -= len(known.popleft().ids)
        if not known:
            del self._groups[group]


def parts_of(asked: Asked, tools: Sequence[TemplateTool]) -> Iterator[PartDigest]:
    """The parts of a call: its system message, its tools, and the other messages, or its prompt."""
    if not isinstance(asked.prompt, TemplatePrompt):
        yield "prompt", b""
        return
    messages = list(enumerate(asked.prompt.messages))
    if messages and messages[0][1]["role"] in ("system", "developer"):
        yield "system", _digest(messages.pop(0)[1])
    for index, tool in enumerate(tools):
        yield named(f"tools[{index}]", asked.names), _digest(tool)
    for index, message in messages:
        yield named(f"messages[{index}]", asked.names), _digest(message)


def _digest(part: object) -> bytes:
    return blake2b(repr(part).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _first_difference(ours: Sequence[PartDigest], theirs: Sequence[PartDigest]) -> str | None:
    """The name of the first part with a difference or without a counterpart. APIs have names of their own."""
    for one, other in zip_longest(ours, theirs):
        if one is None or other is None or one[1] != other[1]:
            name: str = (one or other)[0]
            return name
    return None


def _num_shared(ours: "array[int]", theirs: "array[int]", low: int) -> int:
    """The number of tokens at the begin of both, at least `low`. Each step compares half of the rest."""
    high = min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _explained(seen: Seen, known: Sequence[Seen]) -> CacheExplanation:
    cached = seen.cached or 0
    if seen.earlier is None:
        reason = "no earlier prompt of this key and salt begins like this one"
        return CacheExplanation(seen.id, reason, cached)
    reason = f"{seen.shared} tokens are those of {seen.earlier}, {seen.ago:.0f} s before"
    ours, theirs = seen.tokens
    if ours is not None and theirs is not None:
        place = f"in {seen.part} " if seen.part else ""
        reason += f"; then {place}comes {ours!r} instead of {theirs!r}"
    again = seen.shared - cached
    if ours is None:
        again -= 1  # the last token is always computed
    if again > 0:
        reason += f"; computed again: {again}, since {_cause(seen, known)}"
    return CacheExplanation(
        seen.id,
        reason,
        cached,
        seen.shared,
        seen.earlier,
        seen.ago,
        seen.part,
        ours,
        theirs,
        max(0, again),
    )


def _cause(seen: Seen, known: Sequence[Seen]) -> str:
    if seen.lost is None:
        return "they fill no page, or were not computed yet"
    ago, request = seen.lost
    owner = next((other.id for other in known if request in other.requests), None)
    needed = "another call" if owner is None else owner
    return f"the cache gave them up {ago:.0f} s before, for {needed}"
