"""Preparation of a call that is understood: its prompt, its form and its engine requests, as a job."""

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from orca_jax.link.admission import Deadlines
from orca_jax.link.wire import Submit
from orca_jax.serve.openai.asked import Asked, Limits, Prompt, TemplatePrompt, ToolRules
from orca_jax.serve.openai.cache_hints import LISTS, OF_CALLS, AskedHints, asked_hints
from orca_jax.serve.openai.errors import ApiError, PromptTooLong, named
from orca_jax.serve.openai.explain import Seen, SeenPrompts, parts_of
from orca_jax.serve.openai.form import AnswerForm, answer_form, tool_rules
from orca_jax.serve.openai.generation import Job
from orca_jax.serve.openai.logprobs import token_name
from orca_jax.serve.openai.model import Model, Service
from orca_jax.serve.openai.schema.decisions.bodies import ReadFields
from orca_jax.serve.openai.schema.embeddings import EmbeddingRequest
from orca_jax.serve.openai.schema.limits import MAX_ALL_STOPS, MAX_PROMPTS
from orca_jax.serve.openai.schema.sampling import UNLIMITED, PromptPart, Prompts, SamplingFields
from orca_jax.text.bad_words import bad_word_ids
from orca_jax.text.calls.dialects import HARMONY
from orca_jax.text.calls.offered import Tools
from orca_jax.text.work_threads import SCHEMAS
from orca_jax.values.config import LRU
from orca_jax.values.errors import RequestError
from orca_jax.values.request import DEFAULT_URGENCY, SamplingParams, Urgency, candidate_seed

# Fields of a call with the name of a field in `SamplingParams`, but another form or another way there.
_CONVERTED = frozenset(
    {"max_tokens", "logprobs", "prompt_logprobs", "stop", "bad_words", "cache_salt"}
) | {
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
}
PLAIN = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingFields.__struct_fields__ and field.name not in _CONVERTED
)
"""Fields of a call with the same name and form in `SamplingParams`."""
REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Fields of a message of the assistant that a chat template may read."""

MAX_NAMED = 50  # wrong ids that an error names

type AnyCall = SamplingFields | EmbeddingRequest | ReadFields


async def prepare(service: Service, asked: Asked, name: str, caller: str | None = None) -> Job:
    """Check a call and build its engine requests, so that the engine accepts all of the call or nothing.

    Args:
        service: the served model.
        asked: the call.
        name: name of the call in logs.
        caller: identifies the API key of the call; None without keys.

    Raises:
        ApiError: a field is wrong. The error has the names of the call's API.
    """
    try:
        check(service, asked)
        rules = rules_of(service, asked)
        prompts, text = await _prompts(service, asked, rules)
        form = await _form(service, asked, rules, text)
        hints = asked_hints(asked.fields) if _may_wish(asked.fields) else None
        unheard: Sequence[str] = ()
        if hints is not None:
            unheard = hints.unheard
        if hints is not None and service.config.engine.retention == LRU:
            unheard = hints.names
            hints = None
        requests = await _requests(service, asked, prompts, form, caller, hints)
        seen = await _seen(service, asked, rules, requests, caller)
        unread = (*unread_paths(service, asked.prompt), *rules.unread, *form.unread)
        limit = _cut_limit(asked, requests)
        paths = _engine_paths(asked)
    except ApiError as error:
        error.rename(asked.names)
        raise
    fields = asked.fields
    return Job(
        id=asked.id,
        created=int(time.time()),
        model=service.answering(fields.model),
        endpoint=asked.endpoint,
        name=fields.request_id or name,
        prompts=prompts,
        candidates=asked.candidates,
        requests=requests,
        deadlines=Deadlines(fields.queue_timeout, fields.timeout),
        stops=asked.stops,
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False
        and not form.shows_special_tokens,
        keeps_ids=asked.keeps_ids or (asked.logprobs, asked.prompt_logprobs) != (None, None),
        scores_only=asked.scores_only,
        make_parser=form.make_parser,
        has_reasoning=form.has_reasoning,
        parallel_calls=asked.tools.are_parallel,
        has_short_call_ids=service.model.has_short_call_ids,
        paths=paths,
        names=asked.names,
        ignored=(*asked.unread, *unheard, *[named(path, asked.names) for path in unread]),
        left_out=[named(path, asked.names) for path in form.left_out],
        cut_limit=limit,
        seen=seen,
    )


async def _seen(
    service: Service,
    asked: Asked,
    rules: ToolRules,
    requests: Sequence[Submit],
    caller: str | None,
) -> Seen | None:
    """The prompt of a call beside earlier ones; None without explanations, and for several prompts."""
    first = requests[0]
    if service.seen is None or len(requests) > asked.candidates:
        return None

    def compare(prompts: SeenPrompts) -> Seen:
        seen = Seen(
            asked.id,
            array("I", first.prompt_ids),
            tuple(parts_of(asked, rules.shown)),
            frozenset(request.request_id for request in requests),
            partial(token_name, service.model.tokenizer),
        )
        prompts.add_prompt((caller, first.params.cache_salt, first.adapter), seen)
        return seen

    return await asyncio.to_thread(compare, service.seen)


def _may_wish(call: SamplingFields) -> bool:
    """True if a call has wishes about its cache, or parts that may have marks; nearly all completions have neither."""
    if any([getattr(call, name) is not None for name in OF_CALLS]):
        return True
    return any([isinstance(getattr(call, name, None), list) for name in LISTS])


def _engine_paths(asked: Asked) -> Mapping[str, str]:
    """The path of each parameter of the engine that has another one here."""
    paths: dict[str, str] = {}
    if isinstance(asked.prompt, TemplatePrompt):
        paths["prompt"] = "messages"
    if asked.form is not None:
        paths["structured_outputs"] = "response_format"
    elif asked.fields.structured_outputs is None:
        paths["structured_outputs"] = "tools"
    return paths


def check(service: Service, asked: Asked) -> None:
    """Check the fields that depend on the model or on the server's settings. Raises ApiError."""
    fields = asked.fields
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_ids(service.model, list(getattr(fields, name) or ()), name)
    if sum(map(len, asked.stops)) > MAX_ALL_STOPS:
        raise ApiError(400, f"stop must have at most {MAX_ALL_STOPS} characters in total", "stop")
    if asked.limits.kept == 0:
        raise ApiError(
            400, "truncate_prompt_tokens must leave at least one token", "truncate_prompt_tokens"
        )
    if (fields.min_tokens or 0) >= service.model.context:
        message = f"min_tokens must be less than the context of {service.model.context} tokens, got {fields.min_tokens}"
        raise ApiError(400, message, "min_tokens")
    check_urgency(service, fields)
    most = service.config.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(asked, name)
        if count is not None and count > most:
            raise ApiError(400, f"{name} must be at most {most} on this server, got {count}", name)
    if asked.limits.answer == 0 and not asked.scores_only:
        message = "max_tokens must be at least 1, or -1 for the rest of the context"
        raise ApiError(400, message, "max_tokens")


def check_urgency(service: Service, call: AnyCall) -> None:
    """Refuse what no scheduler or order of the server reads. Raises ApiError."""
    reads = service.client.reads
    if call.priority and "priority" not in reads:
        message = "priority must be 0: this server does not run with --scheduling-policy priority"
        raise ApiError(400, message, "priority", code="unsupported_parameter")
    for name, value in _hints_of(call).items():
        if name not in reads and value != getattr(DEFAULT_URGENCY, name):
            message = f"vllm_xargs.{name} must be left out: no scheduler of this server reads it"
            raise ApiError(400, message, f"vllm_xargs.{name}", code="unsupported_parameter")


def _hints_of(call: AnyCall) -> dict[str, Any]:
    """The fields of `vllm_xargs`, those that are left out included."""
    hints = call.vllm_xargs if isinstance(call, SamplingFields) else None
    return {} if hints is None else msgspec.structs.asdict(hints)


def check_ids(model: Model, ids: Sequence[int], param: str) -> None:
    """Raise ApiError if an id is not in the model's vocabulary."""
    vocab_size = model.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = [i for i in ids if not 0 <= i < vocab_size][:MAX_NAMED]
        kind = "ids" if len(wrong) > 1 else "id"
        shown = f"{kind} {', '.join(map(str, wrong))}"
        raise ApiError(
            400,
            f"{param} contains {shown}, but the model's vocabulary has only {vocab_size} ids",
            param,
        )


def rules_of(service: Service, asked: Asked) -> ToolRules:
    """The effect of the tools of a call on this model. Raises ApiError."""
    if asked.tools.listed or asked.tools.choice is not None:
        return tool_rules(service, asked.tools)
    return ToolRules()


async def _prompts(
    service: Service, asked: Asked, rules: ToolRules
) -> tuple[Sequence[Prompt], str | None]:
    """The prompts, truncated if the call asks for it, and the text of a conversation.

    A refusal for its length says how much of it is tools.
    """
    prompt = asked.prompt
    if not isinstance(prompt, TemplatePrompt):
        return prompt, None
    try:
        whole = await encoded(service, asked, prompt, rules.shown)
        kept = truncated(whole, asked.limits, service.model.context)
        _room_of(service.model, kept, "messages")
    except PromptTooLong as error:
        if rules.shown:
            share = await _share_of_tools(service, prompt, rules.shown)
            error.add_remark(f"{share}: send fewer of them, or shorter descriptions")
        raise
    return [kept], whole.text


async def encoded(
    service: Service, asked: Asked, conversation: TemplatePrompt, tools: Tools
) -> Prompt:
    """The prompt of a conversation, of any length. Raises ApiError."""
    text = await rendered(service, conversation, tools)
    adds_special_tokens = bool(asked.fields.add_special_tokens)
    return Prompt(text, await service.encode(text, "messages", adds_special_tokens))


async def rendered(service: Service, conversation: TemplatePrompt, tools: Tools) -> str:
    """The text of a conversation, from the chat template. Raises ApiError."""
    _check_shown(service, conversation)
    template = service.model.template
    hints = conversation.hints
    if hints and template is not None:
        hints = {name: value for name, value in hints.items() if template.reads(name)}
    return await service.render(
        conversation.messages,
        tools or None,
        add_generation_prompt=conversation.adds_prompt,
        continue_final_message=conversation.is_continued,
        kwargs={**hints, **conversation.variables},
    )


def _check_shown(service: Service, conversation: TemplatePrompt) -> None:
    """Refuse messages that the chat template would leave out. Raises ApiError."""
    shown = service.model.shown
    for index, message in enumerate(conversation.messages):
        if message["role"] == "tool" and not shown.results:
            name = f"messages[{index}].role"
            what = "messages of the role tool"
        elif message.get("tool_calls") and not shown.calls:
            name = f"messages[{index}].tool_calls"
            what = "messages with tool calls"
        else:
            continue
        text = f"{name}: the chat template of this model leaves out {what}; send their text in a user message"
        raise ApiError(400, text, name, code="unsupported_parameter")


async def _share_of_tools(service: Service, conversation: TemplatePrompt, shown: Tools) -> str:
    """The size of the tools in a prompt, in words: in tokens, or in characters if it is too long to count them."""
    texts = [await rendered(service, conversation, tools) for tools in (shown, [])]
    try:
        whole, plain = map(len, await service.encode_all(texts, "messages", False))
        unit = "tokens"
    except ApiError:
        whole, plain = map(len, texts)
        unit = "characters"
    return f"{whole - plain} of these {unit} are {len(shown)} tools"


def unread_paths(service: Service, prompt: TemplatePrompt | Sequence[Prompt]) -> list[str]:
    """The paths of the fields for the chat template that it does not use."""
    if not isinstance(prompt, TemplatePrompt):
        return []
    template = service.model.template
    if template is None:
        return [*prompt.hints, *prompt.thoughts]
    unread = [name for name in prompt.hints if not template.reads(name)]
    if prompt.thoughts and not any([template.reads(name) for name in REASONING_FIELDS]):
        unread += prompt.thoughts
    return unread


def prompt_parts(given: Prompts, name: str) -> list[PromptPart]:
    """The prompts of the field `name`, in order. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(part, int) for part in given):
        return [[part for part in given if isinstance(part, int)]]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise ApiError(
            400, f"{name} must contain 1 to {MAX_PROMPTS} {name}s, got {len(given)}", name
        )
    parts = [part for part in given if not isinstance(part, int)]
    if len(parts) < len(given) or len({type(part) for part in parts}) > 1:
        kinds = "a string, a list of token ids, a list of strings, or a list of lists of token ids"
        raise ApiError(400, f"{name} must be {kinds}", name)
    return parts


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings of a field, as a list."""
    if isinstance(stop, str):
        return [stop]
    return stop or []


def truncated(prompt: Prompt, limits: Limits, context: int) -> Prompt:
    """The prompt, or its last tokens if the call sets `truncate_prompt_tokens`.

    Raises:
        ApiError: the prompt shall leave room for an answer that fills the context.
    """
    keep = limits.kept
    if keep is None:
        return prompt
    if keep < 0:
        limit = max(1, limits.answer or 0)
        if limit >= context:
            message = (
                f"max_tokens must be less than the context of {context} tokens with truncate_prompt_tokens: -1, "
                f"which leaves room for it, got {limit}"
            )
            raise ApiError(400, message, "max_tokens", code="context_length_exceeded")
        keep = context - limit
    if len(prompt.ids) <= keep:
        return prompt
    return Prompt(None, prompt.ids[-keep:])


def _room_of(model: Model, prompt: Prompt, path: str) -> int:
    """The number of tokens that a prompt leaves for the answer. Raises ApiError if there is none."""
    num_prompt = len(prompt.ids)
    room = model.context - num_prompt
    if num_prompt == 0:
        raise ApiError(400, f"{path} must contain at least one token", path)
    if room < 1:
        message = (
            f"this model's maximum context length is {model.context} tokens, and the prompt has {num_prompt}; "
            "at least one must be left for the answer"
        )
        raise PromptTooLong(message, path, num_prompt, model.context - 1)
    return room


async def _form(service: Service, asked: Asked, rules: ToolRules, text: str | None) -> AnswerForm:
    """The form of the answers. A thread reads the schemas of the call. Raises ApiError."""
    model = service.model

    def read() -> AnswerForm:
        return answer_form(model, asked, rules, text)

    if (asked.form, asked.fields.structured_outputs) != (None, None) or asked.tools.listed:
        return await service.work.run_work(SCHEMAS, read)
    if text is None or (model.think_tags is None and model.dialect is not HARMONY):
        return AnswerForm()
    return read()


async def _requests(
    service: Service,
    asked: Asked,
    prompts: Sequence[Prompt],
    form: AnswerForm,
    caller: str | None,
    hints: AskedHints | None,
) -> list[Submit]:
    """As many requests for each prompt as the call has candidates, with different seeds.

    Raises:
        ApiError: a field is wrong, or a prompt is too long.
    """
    call = asked.fields
    model = service.model
    fields: dict[str, Any] = dict(model.defaults)
    fields.pop("max_tokens", None)
    fields |= {name: value for name in PLAIN if (value := getattr(call, name)) is not None}
    fields |= {
        "logprobs": asked.logprobs,
        "prompt_logprobs": asked.prompt_logprobs,
        "structured": form.structured,
        "bad_token_ids": await _bad_words(service, call.bad_words or ()),
        "cache_salt": salt_of(service, call, caller),
    }
    if call.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(dict.fromkeys(call.allowed_token_ids))
    path = "prompt"
    if isinstance(asked.prompt, TemplatePrompt):
        path = "messages"
    urgency = urgency_of(call, caller)
    adapter = service.adapter_of(call.model)
    new_id = service.client.new_request_id
    requests: list[Submit] = []
    made: dict[int, list[SamplingParams]] = {}  # several prompts mostly share their parameters
    for prompt in prompts:
        max_tokens = _max_tokens(model, asked, _room_of(model, prompt, path))
        if hints is not None:
            fields["cache_hints"] = hints.hints_of(prompt)
        if max_tokens not in made or hints is not None:
            made[max_tokens] = _params(fields, max_tokens, asked.candidates)
        requests += [
            Submit(new_id(), prompt.ids, params, urgency, adapter) for params in made[max_tokens]
        ]
    return requests


async def _bad_words(service: Service, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of the bad words of a call. Raises ApiError."""
    if not words:
        return ()
    read = partial(bad_word_ids, service.model.tokenizer, words)
    return await service.encoding(read, "bad_words", sum(map(len, words)))


def _params(fields: Mapping[str, Any], max_tokens: int, candidates: int) -> list[SamplingParams]:
    """The parameters of each candidate. The types of all values were checked when the body was parsed.

    Raises:
        ApiError: a value is wrong.
    """
    seed = fields.get("seed")
    try:
        if seed is None:
            return [SamplingParams(max_tokens=max_tokens, **fields)] * candidates
        seeds = [candidate_seed(seed, choice) for choice in range(candidates)]
        return [SamplingParams(max_tokens=max_tokens, **{**fields, "seed": one}) for one in seeds]
    except RequestError as error:
        raise ApiError(400, error.message, error.param) from None


def _max_tokens(model: Model, asked: Asked, room: int) -> int:
    """The maximum number of generated tokens, reduced to the rest of the context."""
    limit = asked.limits.answer
    if limit is None:
        given = model.defaults.get("max_tokens", asked.limits.default)
        limit = UNLIMITED if given is None else int(given)
    if limit == UNLIMITED:
        return room
    # 0 only scores the prompt; the one token that is generated is dropped
    return min(max(1, limit), room)


def _cut_limit(asked: Asked, requests: Sequence[Submit]) -> int | None:
    """The limit of generated tokens if that of the call is larger than the rest of the context, else None."""
    limit = min([request.params.max_tokens for request in requests])
    wanted = asked.limits.answer
    if wanted is None or wanted <= limit:
        return None
    return limit


def urgency_of(call: AnyCall, caller: str | None) -> Urgency:
    """Inputs of schedulers. The tenant is the API key, or the field `user` on a server without keys."""
    tenant = call.user or "" if caller is None else caller
    return Urgency(call.priority or 0, tenant, call.timeout, **_hints_of(call))


def salt_of(service: Service, call: AnyCall, caller: str | None) -> str:
    """The salt of a call's prefix-cache entries. Key digests have one length, so no salt can imitate another key."""
    salt = call.cache_salt or ""
    if caller is None or not service.salts_keys:
        return salt
    return caller + salt
