"""Fields of calls about the cache of their prompts: those of Anthropic, OpenAI, vLLM and SGLang.

Each is a wish. Unknown keys are left out without a word, except in `kv_hints`, which has an envelope.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.limits import MAX_NAME
from orca_jax.values.cache_hints import HIGHEST_PRIORITY, MOST_SECONDS

MAX_ACTIONS = 64
MAX_DIRECTIVES = 16
Duration = Annotated[
    str, Meta(pattern=r"^[0-9]{1,4}[smh]$", description="A number of seconds, minutes or hours.")
]
Retained = Annotated[str, Meta(pattern=r"^(in[_-]memory|[0-9]{1,4}[smh])$")]
SessionName = Annotated[str, Meta(max_length=MAX_NAME)]
Offset = Annotated[int, Meta(ge=0, le=2**31)]
WishPriority = Annotated[int, Meta(ge=0, le=HIGHEST_PRIORITY)]
LeaseSeconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


def seconds_of(duration: str) -> float:
    """Return the seconds of a `Duration`."""
    return min(MOST_SECONDS, int(duration[:-1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[duration[-1]])


class CacheControl(msgspec.Struct, frozen=True):
    """Anthropic's mark: the prompt up to here, this block included, will come again."""

    type: Literal["ephemeral"] | None = None
    ttl: Duration | None = None


class CacheBreakpoint(msgspec.Struct, frozen=True):
    """OpenAI's mark: the prompt up to here, this part included, will come again."""

    mode: Literal["explicit"] | None = None
    ttl: Duration | None = None


class PromptCacheOptions(msgspec.Struct, frozen=True):
    """OpenAI's options: the mode `explicit` is about marked parts alone, and `ttl` is the least time."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Duration | None = None


class KvHintAction(msgspec.Struct, frozen=True):
    """An action of the envelope. Those of other types than `kv.retain` and `kv.evict` are ignored."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHints(msgspec.Struct, frozen=True):
    """The envelope of vLLM and SGLang."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[KvHintAction], Meta(max_length=MAX_ACTIONS)]


class RetainDirective(msgspec.Struct, frozen=True):
    """A part of the prompt, in tokens, its priority and its time."""

    priority: WishPriority
    start: Offset = 0
    end: Offset | None = None
    duration: LeaseSeconds | None = None
    covers_output: bool = False


class RetainPayload(msgspec.Struct, frozen=True):
    """The payload of `kv.retain`: vLLM's directives, or Dynamo's numbers for the whole request."""

    scope: SessionName | None = None
    directives: Annotated[list[RetainDirective], Meta(max_length=MAX_DIRECTIVES)] | None = None
    priority: WishPriority | None = None
    ttl_seconds: LeaseSeconds | None = None


class EvictPayload(msgspec.Struct, frozen=True):
    """The payload of `kv.evict`; blocks by their hashes are those of other servers."""

    include_current_request: bool = False


class SessionLease(msgspec.Struct, frozen=True):
    """The time for which a context should be kept, up to a block if one is given."""

    type: Literal["ephemeral"] | None = None
    ttl: Annotated[float, Meta(ge=0, le=3600)] = 300.0
    block_offset: Offset | None = None


class ContextEdit(msgspec.Struct, frozen=True):
    """An operation on the blocks of a context, or on all of them. Only `evict` has an effect."""

    type: Literal["offload", "prefetch", "evict"]
    block_start: Offset | None = None
    block_end: Offset | None = None


class ContextManagement(msgspec.Struct, frozen=True):
    """The operations of a call."""

    manage_request: Literal[False] | None = None
    edits: Annotated[list[ContextEdit], Meta(max_length=MAX_DIRECTIVES)] | None = None


class AgentHint(msgspec.Struct, frozen=True):
    """The session of a call, its lease, and operations on its blocks."""

    session_id: SessionName | None = None
    parent_session_id: SessionName | None = None
    cache_control: SessionLease | None = None
    context_management: ContextManagement | None = None
