"""The wishes of a call about its cache, read from the fields of all APIs in one place.

A mark in a conversation ends a part of the prompt. Its place in tokens is estimated: the text of its block is found in
the rendered prompt, and tokens are as dense there as in the whole prompt. If it is not found, the mark is about all of
the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import msgspec

from orca_jax.serve.openai.asked import Prompt
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.cache.fields import (
    AgentHint,
    CacheBreakpoint,
    CacheControl,
    EvictPayload,
    KvHintAction,
    KvHints,
    RetainPayload,
    seconds_of,
)
from orca_jax.serve.openai.schema.sampling import SamplingFields
from orca_jax.values.cache_hints import (
    HIGHEST_PRIORITY,
    MOST_WISHES,
    USUAL_PRIORITY,
    CacheHints,
    CacheWish,
)
from orca_jax.values.errors import RequestError

ANTHROPIC_SECONDS = 300.0
OPENAI_SECONDS = 1800.0
"""The times of marks without `ttl`."""
OF_CALLS = (
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control", "kv_hints", "agent_hint",
)  # fmt: skip
LISTS = ("tools", "system", "messages", "input")
"""The fields of a call with wishes, and those whose parts may have marks."""
_INNER = ("content", "source", "output")
_TAIL = 120  # characters of a block that are sought
_VERSION = "1"  # of the actions


class Mark(NamedTuple):
    """A mark at the end of a block: its field, the last text in the block, and its seconds."""

    path: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class AskedHints:
    """The wishes of a call before its tokens are known.

    Attributes:
        session: the name of the session.
        ends: True if the session ends with the call.
        wishes: wishes for tokens.
        marks: marks in the order of the conversation.
        names: the given fields of the call.
        unheard: parts of these without effect.
    """

    session: str
    ends: bool
    wishes: Sequence[CacheWish]
    marks: Sequence[Mark]
    names: Sequence[str]
    unheard: Sequence[str] = ()

    def hints_of(self, prompt: Prompt) -> CacheHints:
        """The hints for a prompt; of several wishes for a token the one with the longest time counts.

        Raises:
            ApiError: there are more than `MOST_WISHES` wishes.
        """
        place = 0
        found: list[CacheWish] = []
        for mark in self.marks:
            end, place = _end_of(mark, prompt, place)
            found.append(CacheWish(0, end, mark.seconds))
        wishes = [*sorted(found, key=lambda wish: wish.ttl or 0.0), *self.wishes]
        try:
            return CacheHints(self.session, self.ends, tuple(wishes))
        except RequestError as error:
            raise ApiError(400, error.message, self.names[-1]) from None


def asked_hints(call: SamplingFields) -> AskedHints | None:
    """The wishes of a call; None if it has none. Raises ApiError."""
    names = [name for name in OF_CALLS if getattr(call, name) is not None]
    marks: list[Mark] = []
    for name in LISTS:
        marks += _marks(getattr(call, name, None), name)
    names += dict.fromkeys([mark.path for mark in marks])
    if not names:
        return None
    session = call.prompt_cache_key or ""
    ends = False
    wishes: list[CacheWish] = []
    unheard: list[str] = []
    if call.cache_control is not None:
        wishes.append(CacheWish(ttl=_seconds(call.cache_control)))
    wishes += _of_openai(call)
    if call.kv_hints is not None:
        scope, evicts, more = _of_envelope(call.kv_hints, unheard)
        session = scope or session
        ends = evicts
        wishes += more
    if call.agent_hint is not None:
        session = call.agent_hint.session_id or session
        ends = ends or _evicts_all(call.agent_hint)
        wishes += _of_agent(call.agent_hint)
        unheard += _unheard_of(call.agent_hint)
    most = max(0, MOST_WISHES - len(wishes))
    return AskedHints(
        session,
        ends,
        wishes,
        marks[len(marks) - most :] if most else (),
        names,
        tuple(dict.fromkeys(unheard)),
    )


def _of_openai(call: SamplingFields) -> list[CacheWish]:
    """The wish for the whole prompt, unless marks are meant alone."""
    options = call.prompt_cache_options
    if options is not None:
        if options.mode == "explicit":
            return []
        return [CacheWish(ttl=seconds_of(options.ttl) if options.ttl else OPENAI_SECONDS)]
    retention = call.prompt_cache_retention
    if retention is None or retention.startswith("in"):
        return []
    return [CacheWish(ttl=seconds_of(retention))]


def _of_envelope(hints: KvHints, unheard: list[str]) -> tuple[str, bool, list[CacheWish]]:
    """The session of an envelope, True if its pages are of no further use, and its wishes. Raises ApiError."""
    scope = ""
    ends = False
    wishes: list[CacheWish] = []
    for index, action in enumerate(hints.actions):
        is_known = action.action_version.partition(".")[0] == _VERSION
        if is_known and action.action_type == "kv.retain":
            payload = _payload(action, index, RetainPayload)
            scope = payload.scope or scope
            wishes += _retained(payload, index)
        elif is_known and action.action_type == "kv.evict":
            ends = ends or _payload(action, index, EvictPayload).include_current_request
        else:
            unheard.append(f"kv_hints.actions.{action.action_type[:_TAIL]}")
    if ends:
        wishes.append(CacheWish(priority=0))
    return scope, ends, wishes


def _payload[T](action: KvHintAction, index: int, kind: type[T]) -> T:
    try:
        return msgspec.convert(action.payload, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        where = f"kv_hints.actions[{index}].payload{path.strip('`').removeprefix('$')}"
        raise ApiError(400, f"{where}: {what[:1].lower()}{what[1:]}", where) from None


def _retained(payload: RetainPayload, index: int) -> list[CacheWish]:
    if payload.directives is None:
        if payload.priority is None and payload.ttl_seconds is None:
            return []
        priority = USUAL_PRIORITY if payload.priority is None else payload.priority
        return [CacheWish(ttl=payload.ttl_seconds, priority=priority)]
    wishes: list[CacheWish] = []
    for number, each in enumerate(payload.directives):
        if each.end is not None and each.end <= each.start:
            where = f"kv_hints.actions[{index}].payload.directives[{number}].end"
            raise ApiError(400, f"{where} must be after start", where)
        if not each.covers_output:  # an output has no place yet
            wishes.append(CacheWish(each.start, each.end, each.duration, each.priority))
    return wishes


def _evicts_all(hint: AgentHint) -> bool:
    """True if a call says that all of its context may go."""
    management = hint.context_management
    if management is None:
        return False
    return any(
        edit.type == "evict" and edit.block_start is None and edit.block_end is None
        for edit in management.edits or ()
    )


def _of_agent(hint: AgentHint) -> list[CacheWish]:
    """The wishes of an agent: blocks of its server are of unknown size, so those for a part are left out."""
    if _evicts_all(hint):
        return [CacheWish(priority=0)]
    lease = hint.cache_control
    if lease is None or lease.block_offset is not None:
        return []
    return [CacheWish(ttl=lease.ttl, priority=HIGHEST_PRIORITY)]


def _unheard_of(hint: AgentHint) -> list[str]:
    """The parts of an agent's hint without effect."""
    unheard: list[str] = []
    if hint.parent_session_id is not None:
        unheard.append("agent_hint.parent_session_id")
    if hint.cache_control is not None and hint.cache_control.block_offset is not None:
        unheard.append("agent_hint.cache_control.block_offset")
    edits = () if hint.context_management is None else hint.context_management.edits or ()
    if any(
        edit.type != "evict" or (edit.block_start, edit.block_end) != (None, None) for edit in edits
    ):
        unheard.append("agent_hint.context_management.edits")
    return unheard


def _marks(value: Any, path: str) -> Iterator[Mark]:
    """The marks of blocks in their order, those within a block first."""
    if isinstance(value, list):
        for each in value:
            yield from _marks(each, path)
    elif isinstance(value, msgspec.Struct):
        for name in _INNER:
            inner = getattr(value, name, None)
            if isinstance(inner, list | msgspec.Struct):
                yield from _marks(inner, f"{path}.{name}")
        for name in ("cache_control", "prompt_cache_breakpoint"):
            mark = getattr(value, name, None)
            if mark is not None:
                yield Mark(f"{path}.{name}", _text_of(value).strip(), _seconds(mark))


def _text_of(block: Any) -> str:
    """The last text of a block."""
    for name in ("text", "content", "data", "output", "source", "function", "description"):
        inner = getattr(block, name, None)
        if isinstance(inner, list) and inner:
            inner = inner[-1]
        if isinstance(inner, str):
            return inner
        if isinstance(inner, msgspec.Struct):
            return _text_of(inner)
    return ""


def _seconds(mark: CacheControl | CacheBreakpoint) -> float:
    if mark.ttl is not None:
        return seconds_of(mark.ttl)
    return ANTHROPIC_SECONDS if isinstance(mark, CacheControl) else OPENAI_SECONDS


def _end_of(mark: Mark, prompt: Prompt, place: int) -> tuple[int, int]:
    """The end of a marked part in tokens, and the place in the text after it."""
    whole = len(prompt.ids)
    text = prompt.text or ""
    # a template may have changed the begin of a block
    for sought in (mark.text, mark.text[-_TAIL:]):
        found = text.find(sought, place) if sought else -1
        if found >= 0:
            after = found + len(sought)
            return max(1, ceil(whole * after / len(text))), after
    return whole, place
