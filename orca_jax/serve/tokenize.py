"""`POST /tokenize`, `POST /detokenize`, and the prompts of calls, as token ids for routers and as text."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from orca_jax.openai.chat import check_call
from orca_jax.openai.conversation import render_conversation, tool_rules, unread_fields
from orca_jax.openai.endpoints import Endpoint
from orca_jax.openai.errors import ApiError
from orca_jax.openai.logprobs import token_name
from orca_jax.openai.model import Service
from orca_jax.openai.params import check_ids
from orca_jax.openai.schema import chat_parser, detokenize_parser, tokenize_parser
from orca_jax.openai.schema.components import MESSAGES_ONLY
from orca_jax.openai.schema.tokens import Detokenized, Rendered, Tokenized, TokenizeRequest
from orca_jax.openai.schema.tolerant import Ignored
from orca_jax.serve.handlers import headers_of, read_request, report_ignored
from orca_jax.serve.models import json_response


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation. Raises ApiError."""
    call, ignored = await read_request(request, tokenize_parser, service)
    service.check_model(call.model)
    model = service.model
    ids = await _encode(service, call)
    names = [token_name(model.tokenizer, i) for i in ids] if call.return_token_strs else None
    answer = Tokenized(count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=names)
    return json_response(answer, headers=report_ignored(service, ignored))


async def detokenize(service: Service, request: Request) -> Response:
    """Answer with the text of token ids. Raises ApiError."""
    call, ignored = await read_request(request, detokenize_parser, service)
    service.check_model(call.model)
    check_ids(service.model, call.tokens, "tokens")
    decode = partial(service.model.tokenizer.decode, call.tokens, skip_special_tokens=False)
    text = await service.encoding(decode, "tokens", len(call.tokens))
    return json_response(Detokenized(prompt=text), headers=report_ignored(service, ignored))


async def render(endpoint: Endpoint, service: Service, request: Request) -> Response:
    """Answer with the token ids of the prompts of a call, without generating. Raises ApiError."""
    call, ignored = await read_request(request, endpoint.parser, service)
    service.check_model(call.model)
    state = request.scope["state"]
    job = await endpoint.prepare(service, call, state["request_id"], state["caller"])
    answers = [Rendered(request_id=job.id, token_ids=prompt.ids, model=job.model) for prompt in job.prompts]
    return json_response(answers if endpoint.has_prompts else answers[0], headers=headers_of(service, job, ignored))


async def apply_template(service: Service, request: Request) -> Response:
    """Answer with the text of the prompt of a chat, as llama.cpp does. Raises ApiError."""
    call, ignored = await read_request(request, chat_parser, service)
    service.check_model(call.model)
    check_call(service, call)
    rules = tool_rules(call, service)
    text = await render_conversation(service, call.messages, rules.shown, call)
    known = (*ignored.known, *unread_fields(service, call), *rules.ignored)
    return json_response(Detokenized(prompt=text), headers=report_ignored(service, Ignored(known, ignored.unknown)))


async def _encode(service: Service, call: TokenizeRequest) -> list[int]:
    if (call.prompt is None) == (call.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", "prompt")
    if call.prompt is not None:
        for name in MESSAGES_ONLY:
            if getattr(call, name) is not None:
                raise ApiError(400, f"{name} needs messages; it cannot be used with prompt", name)
        return await service.encode(call.prompt, "prompt", call.add_special_tokens is not False)
    assert call.messages is not None
    text = await render_conversation(service, call.messages, call.tools or [], call)
    return await service.encode(text, "messages", bool(call.add_special_tokens))
