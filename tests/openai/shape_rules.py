"""Rules of one choice and of usage in OpenAI's shape: what depends on the request, or on two fields at once."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.openai.shape_structs import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionLogprobs,
    ShapeError,
    Usage,
    require,
)


def num_choices(request: Mapping[str, Any]) -> int:
    """Choices that the request asks for: `n` for each prompt."""
    prompt = request.get("prompt", "")
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return int(request.get("n", 1)) * (len(prompt) if is_batch else 1)


def check_usage(request: Mapping[str, Any], usage: Usage) -> None:
    """The sums are right, and no more was generated than was asked for. Raises ShapeError."""
    require(
        usage.total_tokens == usage.prompt_tokens + usage.completion_tokens,
        f"usage does not add up: {usage}",
    )
    limit = request.get("max_completion_tokens", request.get("max_tokens"))
    if limit is not None and limit != -1:
        candidates = (
            num_choices(request)
            // int(request.get("n", 1))
            * max(request.get("n", 1), request.get("best_of", 1))
        )
        require(
            usage.completion_tokens <= limit * candidates, f"{usage} exceeds {limit} x {candidates}"
        )


def check_completion(request: Mapping[str, Any], answer: Completion) -> None:
    """A whole text completion. Raises ShapeError."""
    check_indices(request, [choice.index for choice in answer.choices])
    require(isinstance(answer.usage, Usage), "usage is missing")
    assert isinstance(answer.usage, Usage)
    check_usage(request, answer.usage)
    for choice in answer.choices:
        require(choice.finish_reason is not None, f"choice {choice.index} has no finish_reason")
        check_completion_logprobs(request, choice.logprobs, f"choice {choice.index}")


def check_indices(request: Mapping[str, Any], indices: Sequence[int]) -> None:
    """Every choice once, in order. Raises ShapeError."""
    expected = num_choices(request)
    require(
        list(indices) == list(range(expected)),
        f"{expected} choices were asked for, got indices {indices}",
    )


def check_completion_logprobs(
    request: Mapping[str, Any], logprobs: CompletionLogprobs | None, where: str
) -> None:
    """There where asked for, all lists of one length. Raises ShapeError."""
    count = request.get("logprobs")
    if count is None or count is False:
        require(logprobs is None, f"{where}: logprobs that nobody asked for")
        return
    require(logprobs is not None, f"{where}: no logprobs")
    assert logprobs is not None
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.text_offset)}
    if logprobs.top_logprobs is not None:
        lengths.add(len(logprobs.top_logprobs))
    require(len(lengths) == 1, f"{where}: lists of logprobs differ in length: {sorted(lengths)}")
    require(logprobs.text_offset == sorted(logprobs.text_offset), f"{where}: text_offset goes back")
    for top in logprobs.top_logprobs or ():
        require(
            len(top or ()) <= count + 1,
            f"{where}: {len(top or ())} top_logprobs, {count} asked for",
        )


def check_chat(request: Mapping[str, Any], answer: ChatCompletion) -> None:
    """A whole chat completion. Raises ShapeError."""
    check_indices(request, [choice.index for choice in answer.choices])
    check_usage(request, answer.usage)
    for choice in answer.choices:
        check_chat_choice(request, choice)


def check_chat_choice(request: Mapping[str, Any], choice: ChatChoice) -> None:
    """A message, whole or put together from deltas. Raises ShapeError."""
    where = f"choice {choice.index}"
    check_chat_logprobs(request, choice.logprobs, where)
    calls = choice.message.tool_calls or ()
    ended = choice.finish_reason != "length"
    require(
        choice.finish_reason != "tool_calls" or calls,
        f"{where}: ended by tool_calls without a call",
    )
    require(len({call.id for call in calls}) == len(calls), f"{where}: two calls of one id")
    names = allowed_tools(request)
    for call in calls:
        require(
            call.function.name in names, f"{where}: calls {call.function.name!r}, which it may not"
        )
        if ended and not request.get("stop"):  # a stop string may end the text within a call
            require(
                isinstance(loads(call.function.arguments, where), dict),
                f"{where}: arguments are no object",
            )
    if ended and is_forced(request):
        require(calls, f"{where}: a call was required and there is none")
    if (
        ended
        and not calls
        and request.get("response_format", {}).get("type") in ("json_object", "json_schema")
    ):
        loads(choice.message.content or "", where)
    require(calls or choice.message.content is not None, f"{where}: neither content nor tool_calls")


def check_chat_logprobs(
    request: Mapping[str, Any], logprobs: ChatLogprobs | None, where: str
) -> None:
    """There where asked for, and no more of them. Raises ShapeError."""
    if not request.get("logprobs"):
        require(logprobs is None, f"{where}: logprobs that nobody asked for")
        return
    require(logprobs is not None and logprobs.content is not None, f"{where}: no logprobs")
    assert logprobs is not None
    count = request.get("top_logprobs", 0)
    for token in logprobs.content or ():
        require(
            len(token.top_logprobs) <= count,
            f"{where}: {len(token.top_logprobs)} top_logprobs, {count} asked for",
        )


def is_forced(request: Mapping[str, Any]) -> bool:
    """Whether the request demands a call."""
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        return bool(choice["allowed_tools"]["mode"] == "required")
    return choice == "required" or isinstance(choice, dict)


def allowed_tools(request: Mapping[str, Any]) -> set[str]:
    """Names that may be called."""
    choice = request.get("tool_choice")
    if choice == "none":
        return set()
    if isinstance(choice, dict) and "function" in choice:
        return {choice["function"]["name"]}
    return {tool["function"]["name"] for tool in request.get("tools", ())}


def loads(text: str, where: str) -> Any:
    """JSON that the model was made to write. Raises ShapeError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ShapeError(f"{where}: {error} in {text[:300]!r}") from None
