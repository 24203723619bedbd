"""`POST /tokenize`, `POST /detokenize`, and the prompts of calls, as token ids for routers and as text."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from orca_jax.serve.handlers import headers_of, prepared_job, read_request, report_ignored
from orca_jax.serve.models import json_response
from orca_jax.serve.openai import chat
from orca_jax.serve.openai.asked import TemplatePrompt
from orca_jax.serve.openai.conversation import plain_messages, plain_tools
from orca_jax.serve.openai.endpoints import Endpoint
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.logprobs import token_name
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import check_ids, rendered
from orca_jax.serve.openai.preview import text_of
from orca_jax.serve.openai.schema import chat_parser, detokenize_parser, tokenize_parser
from orca_jax.serve.openai.schema.chat import ChatRequest
from orca_jax.serve.openai.schema.components import MESSAGES_ONLY
from orca_jax.serve.openai.schema.tokens import (
    Detokenized,
    DetokenizeRequest,
    Rendered,
    Tokenized,
    TokenizeRequest,
)
from orca_jax.serve.openai.schema.tolerant import Ignored


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, tokenize_parser, service)
    service.check_model(call.model)
    answer = await service.work.prepare(num_bytes, partial(_tokenized, service, call))
    return json_response(answer, headers=report_ignored(service, ignored))


async def detokenize(service: Service, request: Request) -> Response:
    """Answer with the text of token ids. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, detokenize_parser, service)
    service.check_model(call.model)
    answer = await service.work.prepare(num_bytes, partial(_detokenized, service, call))
    return json_response(answer, headers=report_ignored(service, ignored))


async def render(endpoint: Endpoint, service: Service, request: Request) -> Response:
    """Answer with the token ids of the prompts of a call, without generating. Raises ApiError."""
    _, ignored, job = await prepared_job(endpoint, service, request)
    answers = [
        Rendered(request_id=job.id, token_ids=prompt.ids, model=job.model) for prompt in job.prompts
    ]
    return json_response(
        answers if endpoint.has_prompts else answers[0], headers=headers_of(service, job, ignored)
    )


async def apply_template(service: Service, request: Request) -> Response:
    """Answer with the text of the prompt of a chat, as llama.cpp does. Raises ApiError."""
    call, ignored, num_bytes = await read_request(request, chat_parser, service)
    service.check_model(call.model)
    answer, left_out = await service.work.prepare(num_bytes, partial(_rendered, service, call))
    known = (*ignored.known, *left_out)
    return json_response(answer, headers=report_ignored(service, Ignored(known, ignored.unknown)))


async def _tokenized(service: Service, call: TokenizeRequest) -> Tokenized:
    model = service.model
    ids = await _encode(service, call)
    names = None
    if call.return_token_strs:
        known = {i: token_name(model.tokenizer, i) for i in set(ids)}  # a text repeats its tokens
        names = [known[i] for i in ids]
    return Tokenized(
        count=len(ids), max_model_len=model.max_model_len, tokens=ids, token_strs=names
    )


async def _detokenized(service: Service, call: DetokenizeRequest) -> Detokenized:
    check_ids(service.model, call.tokens, "tokens")
    decode = partial(service.model.tokenizer.decode, call.tokens, skip_special_tokens=False)
    return Detokenized(prompt=await service.encoding(decode, "tokens", len(call.tokens)))


async def _rendered(service: Service, call: ChatRequest) -> tuple[Detokenized, tuple[str, ...]]:
    text, unread = await text_of(service, chat.understood(call))
    return Detokenized(prompt=text), unread


async def _encode(service: Service, call: TokenizeRequest) -> list[int]:
    if (call.prompt is None) == (call.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", "prompt")
    if call.prompt is not None:
        for name in MESSAGES_ONLY:
            if getattr(call, name) is not None:
                raise ApiError(400, f"{name} needs messages; it cannot be used with prompt", name)
        return await service.encode(call.prompt, "prompt", call.add_special_tokens is not False)
    assert call.messages is not None
    conversation = TemplatePrompt(
        plain_messages(call.messages),
        variables=call.chat_template_kwargs or {},
        adds_prompt=call.add_generation_prompt is not False,
        is_continued=bool(call.continue_final_message),
    )
    text = await rendered(service, conversation, plain_tools(call.tools or ()))
    return await service.encode(text, "messages", bool(call.add_special_tokens))
