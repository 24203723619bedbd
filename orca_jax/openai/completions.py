"""`POST /v1/completions`."""

import time
import uuid
from collections.abc import Sequence

from orca_jax.link.admission import Deadlines
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Job
from orca_jax.openai.model import Prompt, Service
from orca_jax.openai.params import Wanted, check_fields, check_logprobs, engine_requests, salt_of, truncated, urgency_of
from orca_jax.openai.schema.completion import CompletionRequest
from orca_jax.openai.schema.limits import DEFAULT_MAX_TOKENS
from orca_jax.openai.schema.structured import structured_output

ENDPOINT = "/v1/completions"


async def prepare(service: Service, call: CompletionRequest, name: str, caller: str | None = None) -> Job:
    """Everything that can be checked without the engine, so that it takes all of the call or nothing.

    `name` is for logs, `caller` whoever's key it came with.

    Raises:
        ApiError: a field is wrong.
    """
    check_fields(service, call)
    check_logprobs(service, call.logprobs, "logprobs")
    check_logprobs(service, call.prompt_logprobs, "prompt_logprobs")
    if call.max_tokens == 0 and not call.echo:
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo, which then scores the prompt", "max_tokens")
    parts = call.prompts()
    candidates = call.candidates(len(parts))
    prompts = await _prompts(service, call, parts)
    needs_ranking = candidates > (call.n or 1)
    wanted = Wanted(
        max_tokens=call.max_tokens,
        default=DEFAULT_MAX_TOKENS,
        logprobs=0 if call.logprobs is None and needs_ranking else call.logprobs,
        prompt_logprobs=_most(call.prompt_logprobs, call.logprobs if call.echo else None),
        structured=structured_output(call.response_format, call.structured_outputs),
        cache_salt=salt_of(service, call, caller),
    )
    return Job(
        id=f"cmpl-{call.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.names[0],
        endpoint=ENDPOINT,
        name=call.request_id or name,
        prompts=prompts,
        candidates=candidates,
        requests=engine_requests(service, call, prompts, candidates, wanted, urgency_of(call, caller)),
        deadlines=Deadlines(call.queue_timeout, call.timeout),
        stops=call.stops(),
        include_stop=bool(call.include_stop_str_in_output),
        skip_special_tokens=call.skip_special_tokens is not False,
        keeps_ids=wanted.logprobs is not None or wanted.prompt_logprobs is not None or bool(call.return_token_ids),
        scores_only=call.max_tokens == 0,
        renamed={"structured_outputs": "response_format"} if call.structured_outputs is None else None,
    )


async def _prompts(service: Service, call: CompletionRequest, parts: Sequence[str | list[int]]) -> list[Prompt]:
    """Texts as ids, ids as they are; cut where the call asks for it. Parts are all of one kind."""
    texts = [part for part in parts if isinstance(part, str)]
    encoded = await service.encode_all(texts, "prompt", call.add_special_tokens is not False)
    prompts = [Prompt(text, ids) for text, ids in zip(texts, encoded, strict=True)]
    prompts += [Prompt(None, part) for part in parts if not isinstance(part, str)]
    context = service.model.context
    prompts = [truncated(prompt, call, call.max_tokens, context) for prompt in prompts]
    for prompt in prompts:
        if prompt.text is None and len(prompt.ids) <= context:  # longer ones are refused for their length
            service.check_ids(prompt.ids, "prompt")
    return prompts


def _most(one: int | None, other: int | None) -> int | None:
    return max((count for count in (one, other) if count is not None), default=None)
