"""`POST /v1/messages`: a call checked and prepared for the engine, and the number of tokens of its prompt."""

import dataclasses
import uuid
from collections.abc import Sequence

import msgspec

from orca_jax.openai import chat
from orca_jax.openai.conversation import tool_rules, unread_fields
from orca_jax.openai.errors import ApiError
from orca_jax.openai.formats import moved
from orca_jax.openai.generation import Job
from orca_jax.openai.messages.conversion import IGNORED, NAMES, PLACES, converted
from orca_jax.openai.messages.errors import MESSAGES
from orca_jax.openai.model import Service
from orca_jax.openai.schema.messages import MessagesRequest


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


async def prepare(service: Service, call: MessagesRequest, name: str, caller: str | None) -> Job:
    """Check a call and build its engine request. See `chat.prepare`. Raises ApiError."""
    same = converted(call, keeps_late_system=service.model.keeps_late_system)
    try:
        job = await chat.prepare(service, same.call, name, caller)
    except ApiError as error:
        raise error.renamed(NAMES) from None
    renamed = {param: NAMES.get(field, field) for param, field in (job.renamed or {}).items()}
    return dataclasses.replace(
        job,
        id=f"msg_{call.request_id or uuid.uuid4().hex}",
        endpoint=MESSAGES,
        renamed=renamed,
        ignored=(*same.ignored, *_own_names(job.ignored)),
        left_out=moved(job.left_out, PLACES),
    )


def fills_context(service: Service, call: MessagesRequest, job: Job) -> bool:
    """True if the limit of an answer is the rest of the context, and not the limit of its call."""
    limit = job.requests[0].params.max_tokens
    return limit == service.model.context - len(job.prompts[0].ids) and limit != call.max_tokens


async def count_tokens(service: Service, call: MessagesRequest) -> tuple[TokenCount, tuple[str, ...]]:
    """The number of tokens of a call's prompt, and the names of what has no effect on it. Raises ApiError."""
    same = converted(call, keeps_late_system=service.model.keeps_late_system)
    try:
        chat.check_call(service, same.call)
        rules = tool_rules(same.call, service)
        prompt = await chat.prompt_of(service, same.call, rules)
    except ApiError as error:
        raise error.renamed(NAMES) from None
    left_out = _own_names([*unread_fields(service, same.call), *rules.ignored])
    return TokenCount(len(prompt.ids)), (*same.ignored, *left_out)


def _own_names(ignored: Sequence[str]) -> list[str]:
    return [IGNORED.get(name, name) for name in ignored]
