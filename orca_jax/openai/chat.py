"""`POST /v1/chat/completions`."""

import time
import uuid

from orca_jax.link.admission import Deadlines
from orca_jax.openai.conversation import render_conversation, structured_answer, tool_rules
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Job
from orca_jax.openai.model import Prompt, Service
from orca_jax.openai.params import Wanted, check_fields, check_logprobs, engine_requests, salt_of, truncated, urgency_of
from orca_jax.openai.schema.chat import ChatRequest, NamedTool

ENDPOINT = "/v1/chat/completions"


async def prepare(service: Service, call: ChatRequest, name: str, caller: str | None = None) -> Job:
    """Everything that can be checked without the engine, so that it takes all of the call or nothing.

    `name` is for logs, `caller` whoever's key it came with.

    Raises:
        ApiError: a field is wrong.
    """
    _check(service, call)
    rules = tool_rules(call, service.config.tool_call_parser)
    structured = structured_answer(call, rules)
    called = _streamed_call(call)
    text = await render_conversation(service, call.messages, rules.shown, call)
    ids = await service.encode(text, "messages", bool(call.add_special_tokens))
    prompt = truncated(Prompt(text, ids), call, call.limit, service.model.context)
    wanted = Wanted(
        max_tokens=call.limit,
        limit_name=call.limit_name,
        prompt_name="messages",
        logprobs=(call.top_logprobs or 0) if call.logprobs else None,
        prompt_logprobs=call.prompt_logprobs,
        structured=structured,
        cache_salt=salt_of(service, call, caller),
    )
    return Job(
        id=f"chatcmpl-{call.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.names[0],
        endpoint=ENDPOINT,
        name=call.request_id or name,
        prompts=[prompt],
        candidates=call.n or 1,
        requests=engine_requests(service, call, [prompt], call.n or 1, wanted, urgency_of(call, caller)),
        deadlines=Deadlines(call.queue_timeout, call.timeout),
        stops=call.stops(),
        include_stop=bool(call.include_stop_str_in_output),
        skip_special_tokens=call.skip_special_tokens is not False and not rules.shows_special_tokens,
        keeps_ids=bool(call.logprobs or call.return_token_ids) or call.prompt_logprobs is not None,
        make_parser=rules.make_parser if called is None else None,
        called=called,
        parallel_calls=call.parallel_tool_calls is not False,
        renamed=_renamed(call),
    )


def _streamed_call(call: ChatRequest) -> str | None:
    """The function whose arguments can go out as they come, since nothing but their end ends the text."""
    if not call.stream or call.stop or call.stop_token_ids or not isinstance(call.tool_choice, NamedTool):
        return None
    return call.tool_choice.function.name


def _check(service: Service, call: ChatRequest) -> None:
    check_fields(service, call)
    check_logprobs(service, call.top_logprobs, "top_logprobs")
    check_logprobs(service, call.prompt_logprobs, "prompt_logprobs")
    if call.top_logprobs and not call.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if None not in (call.max_tokens, call.max_completion_tokens) and call.max_tokens != call.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens are one thing; send one of them", "max_tokens")
    if call.echo and not call.continue_final_message:
        raise ApiError(400, "echo needs continue_final_message: there is nothing to repeat", "echo")


def _renamed(call: ChatRequest) -> dict[str, str]:
    """Names of the engine's parameters -> those that the caller used."""
    renamed = {"logprobs": "top_logprobs", "prompt": "messages", "max_tokens": call.limit_name}
    if call.structured_outputs is None:
        renamed["structured_outputs"] = "tools" if call.response_format is None else "response_format"
    return renamed
