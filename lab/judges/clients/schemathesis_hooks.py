"""Hooks for schemathesis: the accepted reasons for refusals of well-formed requests.

The document describes the values of each field. It cannot describe the length of the context, the syntax of a regular
expression, or combinations of fields. The server may refuse a valid request (400, 408, 503) only for these reasons.
"""

import contextlib
import json
import re
from typing import Any

import schemathesis

REASONS = (
    # lengths: the document cannot bound sums
    "maximum context length",
    "the context of this model holds at most",
    "prompt is too long: ",
    "must contain (at least one token|1 to )",
    "truncate_prompt_tokens must leave at least one token",
    "dimensions must be left out: this model was not trained for fewer dimensions",
    "must be less than the context of .* with truncate_prompt_tokens: -1",
    "min_tokens must be an integer from 0 to ",
    "max_tokens must be at least 1, -1 for the rest of the context, or 0 with echo",
    "best_of must be at least n",
    "candidates each exceed",
    # fields that require or exclude each other
    "stream_options needs stream: true",
    "needs include_usage",
    "prompt_logprobs cannot be combined with stream",
    "best_of cannot be streamed",
    "top_logprobs requires logprobs: true",
    "tool_choice forces a call, but tools is empty",
    "tool_choice names .* not one of the tools",
    "max_tokens and max_completion_tokens mean the same",
    "chat_template_kwargs must not hold",
    "continue_final_message needs text as content",
    "echo requires continue_final_message",
    "continue_final_message cannot be combined with add_generation_prompt",
    "structured_outputs and response_format cannot be combined",
    "structured_outputs cannot be combined with a forced call",
    "needs messages; it cannot be used with prompt",
    "give exactly one of prompt and messages",
    "(prompt|input) must be a string, a list of token ids, ",
    "structured_outputs must have exactly one of",
    "json_object must be true",
    "is used twice",
    # conversations of /v1/messages: the document cannot describe the order of blocks and roles
    "the results of its tool calls must follow",
    "has no text that could be continued",
    "messages has no text",
    "cannot have blocks of type",
    "tool_choice.name is required",
    # conversations of /v1/responses
    "input must have at least one item",
    "with id .* not found",
    "input refers to item .* times",
    "(images|files|audio) are not supported",
    "the server runs no tool of type",
    "tool_choice.tools must have a function",
    # languages of their own
    "arguments of the tool call .* must be JSON",
    "(json_schema|regex|choice|grammar|structure|a strict tool,) cannot be used",
    "(schema|parameters|structured_outputs.json) cannot be used: ",
    # keys of an object are strings: the document cannot bound their numbers
    "logit_bias(: the keys?| contains ids?) ",
    "no token could follow",
    "the structure of the output became too complex",
    # the caller's own deadlines
    "took longer than its timeout allows",
    "waited longer for the engine than its queue timeout allows",
)


STORED: list[str] = []
"""Ids of stored responses, which no generator could guess."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Write integers as such: for JSON Schema 2.0 is an integer, but the server requires 2. Name stored responses."""
    case.body = with_integers(case.body)
    meta = case.meta
    if meta is None or meta.phase.name.name == "STATEFUL":  # whose links know ids
        return
    if "response_id" in (case.path_parameters or {}) and STORED and is_positive(meta):
        case.path_parameters["response_id"] = (
            STORED.pop() if case.method == "DELETE" else STORED[-1]
        )


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Keep the ids of stored responses."""
    if case.method == "POST" and case.path == "/v1/responses" and response.status_code == 200:
        with contextlib.suppress(ValueError):  # a stream
            STORED.append(json.loads(response.content)["id"])


def with_integers(value: Any) -> Any:
    """The same JSON, with integral floats as integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: with_integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_integers(one) for one in value]
    return value


def is_positive(meta: Any) -> bool:
    """True for a case that the document allows."""
    return bool(meta.generation.mode.is_positive)


@schemathesis.check
def refused_for_a_reason(context: Any, response: Any, case: Any) -> None:
    """Fail if the server refuses a valid request for a reason outside `REASONS`."""
    meta = case.meta
    if meta is None or not is_positive(meta) or response.status_code not in (400, 408, 503):
        return
    error = json.loads(response.content)["error"]
    if not any(re.search(reason, error["message"], re.DOTALL) for reason in REASONS):
        raise AssertionError(f"refused without a known reason: {response.status_code} {error}")
