"""The judge of shapes is judged: good answers pass, and each rule catches an answer that breaks it and nothing else."""

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.openai.shapes import ShapeError, check_response

Json = dict[str, Any]
Change = Callable[[Any], object]

NAMED = {"X-Request-Id": "req_1", "Content-Type": "application/json"}
STREAM = {**NAMED, "Content-Type": "text/event-stream; charset=utf-8"}
FRAME = {"id": "cmpl-1", "created": 1, "model": "toy"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
LOGPROBS = {
    "tokens": ["a", "b"],
    "token_logprobs": [None, -0.5],
    "top_logprobs": [None, {"b": -0.5}],
    "text_offset": [0, 1],
}
CHAT_LOGPROBS = {
    "content": [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
        }
    ],
    "refusal": None,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


def text_choice(index: int = 0, **fields: Any) -> Json:
    return {"index": index, "text": "ab", "logprobs": None, "finish_reason": "length", **fields}


def completion(*choices: Json, **fields: Any) -> Json:
    return {
        **FRAME,
        "object": "text_completion",
        "choices": list(choices or [text_choice()]),
        **fields,
    }


def chat_choice(finish_reason: str = "stop", logprobs: Any = None, **message: Any) -> Json:
    whole = {"role": "assistant", "content": "ab", "refusal": None, **message}
    return {"index": 0, "message": whole, "logprobs": logprobs, "finish_reason": finish_reason}


def chat(*choices: Json) -> Json:
    return {
        **FRAME,
        "object": "chat.completion",
        "choices": list(choices or [chat_choice()]),
        "usage": USAGE,
    }


def chunk(delta: Json, finish_reason: str | None = None, index: int = 0, **fields: Any) -> Json:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**FRAME, "object": "chat.completion.chunk", "choices": [choice], **fields}


def sse(*events: Any) -> str:
    return "".join(
        f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events
    )


def check(path: str, request: Json, answer: Any, status: int = 200, **options: Any) -> None:
    headers: Mapping[str, str] = options.pop(
        "headers", STREAM if request.get("stream") and status == 200 else NAMED
    )
    body = answer if isinstance(answer, str) else json.dumps(answer)
    method = "POST" if request else "GET"
    check_response(
        method, path, json.dumps(request).encode(), status, headers, body.encode(), **options
    )


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN = {"model": "toy", "prompt": "hi"}
TALK: Json = {"model": "toy", "messages": []}
CARD = {"id": "toy", "object": "model", "created": 1, "owned_by": "us", "max_model_len": 64}
ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
FAILED = {"error": {**ERROR["error"], "type": "server_error"}}
TOOL_TALK = {**TALK, "tools": [TOOL]}
CALLING = chat_choice("tool_calls", content=None, tool_calls=[CALL])

WHOLE: dict[str, tuple[str, Json, Json]] = {
    "completion": (TEXT, PLAIN, completion(usage=USAGE)),
    "batch": (
        TEXT,
        {**PLAIN, "prompt": [[1], [2]], "n": 2},
        completion(*map(text_choice, range(4)), usage=USAGE),
    ),
    "ids": (TEXT, {**PLAIN, "prompt": [1, 2]}, completion(usage=USAGE)),
    "logprobs": (
        TEXT,
        {**PLAIN, "logprobs": 1},
        completion(text_choice(logprobs=LOGPROBS), usage=USAGE),
    ),
    "limit": (TEXT, {**PLAIN, "max_tokens": 3}, completion(usage=USAGE)),
    "chat": (CHAT, TALK, chat()),
    "chat logprobs": (
        CHAT,
        {**TALK, "logprobs": True, "top_logprobs": 1},
        chat(chat_choice(logprobs=CHAT_LOGPROBS)),
    ),
    "tools": (CHAT, TOOL_TALK, chat(CALLING)),
    "required": (CHAT, {**TOOL_TALK, "tool_choice": "required"}, chat(CALLING)),
    "json": (
        CHAT,
        {**TALK, "response_format": {"type": "json_object"}},
        chat(chat_choice(content="{}")),
    ),
    "models": ("/v1/models", {}, {"object": "list", "data": [CARD]}),
    "model": ("/v1/models/toy", {}, CARD),
    "tokenize": ("/tokenize", {"prompt": "hi"}, {"count": 1, "max_model_len": 9, "tokens": [4]}),
    "detokenize": ("/detokenize", {"tokens": [4]}, {"prompt": "hi"}),
}

BAD: list[tuple[str, Change, str]] = [
    ("completion", lambda a: a.pop("id"), "missing required field `id`"),
    ("completion", lambda a: a.update(id=""), "length >= 1"),
    ("completion", lambda a: a.update(object="completion"), "object"),
    ("completion", lambda a: a.update(created=1.5), "created"),
    ("completion", lambda a: a.pop("model"), "`model`"),
    ("completion", lambda a: a.update(surprise=1), "unknown field `surprise`"),
    ("completion", lambda a: a.pop("usage"), "usage is missing"),
    ("completion", lambda a: a["usage"].update(total_tokens=6), "add up"),
    ("completion", lambda a: a["choices"][0].pop("logprobs"), "`logprobs`"),
    ("completion", lambda a: a["choices"][0].update(finish_reason="abort"), "abort"),
    ("completion", lambda a: a["choices"][0].update(finish_reason="tool_calls"), "tool_calls"),
    ("completion", lambda a: a["choices"][0].update(finish_reason=None), "no finish_reason"),
    ("completion", lambda a: a["choices"][0].update(text=None), "text"),
    ("completion", lambda a: a["choices"][0].update(index=1), "1 choices were asked for"),
    ("completion", lambda a: a["choices"][0].update(logprobs=LOGPROBS), "nobody asked"),
    ("completion", lambda a: a["choices"].append(text_choice()), "1 choices were asked for"),
    ("batch", lambda a: a["choices"].pop(), "4 choices were asked for"),
    ("logprobs", lambda a: a["choices"][0].update(logprobs=None), "no logprobs"),
    ("logprobs", lambda a: a["choices"][0]["logprobs"]["tokens"].pop(), "differ in length"),
    ("logprobs", lambda a: a["choices"][0]["logprobs"].pop("text_offset"), "text_offset"),
    ("logprobs", lambda a: a["choices"][0]["logprobs"].update(text_offset=[1, 0]), "goes back"),
    ("logprobs", lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[None, 0.5]), "<="),
    ("logprobs", lambda a: a["choices"][0]["logprobs"]["top_logprobs"][1].update(c=-1, d=-2), "1 asked for"),
    ("limit", lambda a: a.update(usage={"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}), "exceeds 3"),
    ("chat", lambda a: a.update(choices=[]), "length >= 1"),
    ("chat", lambda a: a.update(object="text_completion"), "object"),
    ("chat", lambda a: a.pop("usage"), "`usage`"),
    ("chat", lambda a: a["choices"][0].pop("logprobs"), "`logprobs`"),
    ("chat", lambda a: a["choices"][0].pop("finish_reason"), "`finish_reason`"),
    ("chat", lambda a: a["choices"][0].update(finish_reason="abort"), "abort"),
    ("chat", lambda a: a["choices"][0].update(finish_reason="tool_calls"), "without a call"),
    ("chat", lambda a: a["choices"][0]["message"].pop("refusal"), "`refusal`"),
    ("chat", lambda a: a["choices"][0]["message"].pop("content"), "`content`"),
    ("chat", lambda a: a["choices"][0]["message"].update(content=None), "neither content"),
    ("chat", lambda a: a["choices"][0]["message"].update(role="user"), "role"),
    ("chat", lambda a: a["choices"][0]["message"].update(tool_calls=[]), "length >= 1"),
    ("chat", lambda a: a["choices"][0]["message"].update(tool_calls=[CALL]), "may not"),
    ("chat", lambda a: a["choices"][0].update(logprobs=CHAT_LOGPROBS), "nobody asked"),
    ("chat logprobs", lambda a: a["choices"][0].update(logprobs=None), "no logprobs"),
    ("chat logprobs", lambda a: a["choices"][0]["logprobs"].pop("refusal"), "`refusal`"),
    ("chat logprobs", lambda a: a["choices"][0]["logprobs"]["content"][0].pop("bytes"), "`bytes`"),
    ("chat logprobs", lambda a: a["choices"][0]["logprobs"]["content"][0].update(bytes=[256]), "<= 255"),
    ("chat logprobs", lambda a: a["choices"][0]["logprobs"]["content"][0]["top_logprobs"].append(
        {"token": "b", "logprob": -1, "bytes": None}), "2 top_logprobs, 1 asked"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"].append(CALL), "of one id"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"][0].pop("id"), "`id`"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"][0].update(type="tool"), "tool"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"][0]["function"].update(name="sub"), "may not"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"][0]["function"].update(arguments="{"), "Expecting"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"][0]["function"].update(arguments="1"), "no object"),
    ("tools", lambda a: a["choices"][0]["message"]["tool_calls"][0]["function"].update(arguments={}), "arguments"),
    ("required", lambda a: a.update(choices=[chat_choice()]), "required and there is none"),
    ("json", lambda a: a["choices"][0]["message"].update(content="{"), "Expecting"),
    ("models", lambda a: a.update(object="models"), "object"),
    ("models", lambda a: a["data"][0].pop("owned_by"), "owned_by"),
    ("model", lambda a: a.update(object="card"), "object"),
    ("tokenize", lambda a: a.update(tokens=["a"]), "tokens"),
    ("detokenize", lambda a: a.update(prompt=1), "prompt"),
]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_good_answer(name: str) -> None:
    check(*WHOLE[name])


@pytest.mark.parametrize(
    ("name", "change", "message"), BAD, ids=[f"{i}-{row[0]}" for i, row in enumerate(BAD)]
)
def test_bad_answer(name: str, change: Change, message: str) -> None:
    path, request, answer = copy.deepcopy(WHOLE[name])
    change(answer)
    with pytest.raises(ShapeError, match=message):
        check(path, request, answer)


def test_not_a_number_is_not_json() -> None:
    with pytest.raises(ShapeError, match="malformed"):
        check(TEXT, PLAIN, json.dumps(completion(text_choice(logprobs=float("nan")), usage=USAGE)))


def test_headers() -> None:
    with pytest.raises(ShapeError, match="x-request-id"):
        check(TEXT, PLAIN, completion(usage=USAGE), headers={"content-type": "application/json"})
    for path, request, answer in (WHOLE["completion"], WHOLE["chat"]):
        with pytest.raises(ShapeError, match="content-type"):
            check(path, request, answer, headers={**NAMED, "Content-Type": "text/html"})
        with pytest.raises(ShapeError, match="content-type of a stream"):
            check(path, {**request, "stream": True}, answer, headers=NAMED)


GOOD_ERRORS: list[tuple[int, Json, Json]] = [
    (400, ERROR, {}),
    (
        401,
        {"error": {**ERROR["error"], "type": "authentication_error"}},
        {"www-authenticate": "Bearer"},
    ),
    (429, ERROR, {"retry-after": "1"}),
    (500, FAILED, {}),
    (503, FAILED, {"retry-after": "1"}),
]
BAD_ERRORS: list[tuple[int, Any, Json, str]] = [
    *(
        (400, {"error": {k: v for k, v in ERROR["error"].items() if k != gone}}, {}, gone)
        for gone in ERROR["error"]
    ),
    (400, {"error": {**ERROR["error"], "code": 400}}, {}, "code"),
    (400, {"error": {**ERROR["error"], "message": ""}}, {}, "message"),
    (400, {"error": {**ERROR["error"], "status": 400}}, {}, "unknown field"),
    (400, {"detail": "no"}, {}, "unknown field|missing required"),
    (400, "no", {}, "truncated"),
    (400, ERROR, {"content-type": "text/plain"}, "content-type"),
    (400, FAILED, {}, "type is server_error"),
    (401, ERROR, {"www-authenticate": "Bearer"}, "type is invalid"),
    (401, {"error": {**ERROR["error"], "type": "authentication_error"}}, {}, "no www-authenticate"),
    (429, ERROR, {}, "retry-after"),
    (500, ERROR, {}, "type is invalid"),
    (503, FAILED, {"retry-after": "soon"}, "retry-after"),
]


@pytest.mark.parametrize(("status", "answer", "headers"), GOOD_ERRORS)
def test_good_error(status: int, answer: Json, headers: Json) -> None:
    check(
        TEXT,
        PLAIN,
        answer,
        status,
        headers={"x-request-id": "r", "content-type": "application/json", **headers},
    )


@pytest.mark.parametrize(("status", "answer", "headers", "message"), BAD_ERRORS)
def test_bad_error(status: int, answer: Any, headers: Json, message: str) -> None:
    named = {"x-request-id": "r", "content-type": "application/json", **headers}
    with pytest.raises(ShapeError, match=message):
        check(TEXT, PLAIN, answer, status, headers=named)


def test_probes_say_503_in_their_own_words() -> None:
    check("/health", {}, {"status": "loading"}, 503)
    with pytest.raises(ShapeError):
        check("/v1/models", {}, {"status": "loading"}, 503)


ROLE = chunk({"role": "assistant", "content": ""})
TEXT_STREAM = {**PLAIN, "stream": True}
CHAT_STREAM = {**TALK, "stream": True}
WITH_USAGE = {**CHAT_STREAM, "stream_options": {"include_usage": True}}
NAMED_CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": ""},
}
MORE_CALL = {"index": 0, "function": {"arguments": "{}"}}
LAST_USAGE = {**chunk({}), "choices": [], "usage": USAGE}
PIECE = completion(text_choice(finish_reason=None))
WORD, END = chunk({"content": "a"}), chunk({}, "stop")
CALL_STREAM = {**TOOL_TALK, "stream": True}
LOGGED = chunk({"content": "a"})
LOGGED["choices"][0]["logprobs"] = CHAT_LOGPROBS

GOOD_STREAMS: dict[str, tuple[str, Json, str]] = {
    "completion": (TEXT, TEXT_STREAM, sse(PIECE, completion(), "[DONE]")),
    "keep-alive": (TEXT, TEXT_STREAM, ": alive\n\n" + sse(PIECE, completion(), "[DONE]")),
    "two": (
        TEXT,
        {**TEXT_STREAM, "n": 2},
        sse(completion(text_choice(1)), PIECE, completion(), "[DONE]"),
    ),
    "chat": (CHAT, CHAT_STREAM, sse(ROLE, WORD, END, "[DONE]")),
    "usage": (
        CHAT,
        WITH_USAGE,
        sse(*({**c, "usage": None} for c in (ROLE, WORD, END)), LAST_USAGE, "[DONE]"),
    ),
    "continuous": (
        CHAT,
        {**CHAT_STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        sse(*({**c, "usage": USAGE} for c in (ROLE, WORD, END)), LAST_USAGE, "[DONE]"),
    ),
    "logprobs": (
        CHAT,
        {**CHAT_STREAM, "logprobs": True, "top_logprobs": 1},
        sse(ROLE, LOGGED, END, "[DONE]"),
    ),
    "call": (
        CHAT,
        CALL_STREAM,
        sse(
            ROLE,
            chunk({"tool_calls": [NAMED_CALL]}),
            chunk({"tool_calls": [MORE_CALL]}),
            chunk({}, "tool_calls"),
            "[DONE]",
        ),
    ),
    "error": (CHAT, CHAT_STREAM, sse(ROLE, WORD, FAILED)),
    "error and done": (CHAT, CHAT_STREAM, sse(ROLE, FAILED, "[DONE]")),
}
BAD_STREAMS: list[tuple[str, Json, str, str]] = [
    (TEXT, TEXT_STREAM, sse(PIECE, completion()), r"without \[DONE\]"),
    (TEXT, TEXT_STREAM, sse("[DONE]"), "without a chunk"),
    (TEXT, TEXT_STREAM, sse(completion(), "[DONE]", completion()), r"after \[DONE\]"),
    (TEXT, TEXT_STREAM, sse(completion(), "[DONE]")[:-1], "middle of an event"),
    (TEXT, TEXT_STREAM, "event: x\n" + sse(completion(), "[DONE]"), "one line of data"),
    (TEXT, TEXT_STREAM, sse(completion(), "[DONE]").replace("data: ", "data:"), "one line of data"),
    (TEXT, TEXT_STREAM, sse(PIECE, "[DONE]"), "no finish_reason"),
    (TEXT, TEXT_STREAM, sse(completion(), completion(), "[DONE]"), "goes on after its end"),
    (TEXT, TEXT_STREAM, sse(completion(text_choice(1)), "[DONE]"), "choice 1 of 1"),
    (TEXT, {**TEXT_STREAM, "n": 2}, sse(completion(), "[DONE]"), "2 choices were asked for"),
    (TEXT, TEXT_STREAM, sse(PIECE, completion(id="cmpl-2"), "[DONE]"), "id changes"),
    (TEXT, TEXT_STREAM, sse(PIECE, completion(created=2), "[DONE]"), "created changes"),
    (TEXT, TEXT_STREAM, sse(completion(text_choice(finish_reason="abort")), "[DONE]"), "abort"),
    (TEXT, TEXT_STREAM, sse(completion(usage=None), "[DONE]"), "nobody asked"),
    (TEXT, {**TEXT_STREAM, "logprobs": 1}, sse(completion(), "[DONE]"), "no logprobs"),
    (TEXT, TEXT_STREAM, sse(completion(text_choice(logprobs=LOGPROBS)), "[DONE]"), "nobody asked"),
    (TEXT, TEXT_STREAM, sse(FAILED, completion(), "[DONE]"), "after an error"),
    (TEXT, TEXT_STREAM, sse({"error": "no"}), "an error in a stream"),
    (CHAT, CHAT_STREAM, sse(WORD, END, "[DONE]"), "no role"),
    (
        CHAT,
        CHAT_STREAM,
        sse(chunk({"role": "assistant", "content": "a"}), END, "[DONE]"),
        "not empty",
    ),
    (CHAT, CHAT_STREAM, sse(ROLE, ROLE, END, "[DONE]"), "repeats the role"),
    (CHAT, CHAT_STREAM, sse(ROLE, WORD, "[DONE]"), "no finish_reason"),
    (CHAT, CHAT_STREAM, sse(ROLE, chunk({}, "abort"), "[DONE]"), "abort"),
    (CHAT, CHAT_STREAM, sse(ROLE, chunk({}, "tool_calls"), "[DONE]"), "without a call"),
    (CHAT, CHAT_STREAM, sse(ROLE, LOGGED, END, "[DONE]"), "nobody asked"),
    (CHAT, CHAT_STREAM, sse(ROLE, END, LAST_USAGE, "[DONE]"), "nobody asked"),
    (CHAT, CHAT_STREAM, sse(ROLE, {**LAST_USAGE, "usage": None}, END, "[DONE]"), "nobody asked"),
    (CHAT, WITH_USAGE, sse(ROLE, END, LAST_USAGE, "[DONE]"), "into every chunk"),
    (
        CHAT,
        WITH_USAGE,
        sse({**ROLE, "usage": None}, {**END, "usage": None}, "[DONE]"),
        "has choices",
    ),
    (
        CHAT,
        WITH_USAGE,
        sse({**ROLE, "usage": USAGE}, LAST_USAGE, "[DONE]"),
        "usage before the last",
    ),
    (CHAT, WITH_USAGE, sse({**LAST_USAGE, "usage": None}, LAST_USAGE, "[DONE]"), "not the last"),
    (
        CHAT,
        CALL_STREAM,
        sse(ROLE, chunk({"tool_calls": [MORE_CALL]}), END, "[DONE]"),
        "no id or type",
    ),
    (
        CHAT,
        CALL_STREAM,
        sse(ROLE, chunk({"tool_calls": [{**NAMED_CALL, "index": 1}]}), END, "[DONE]"),
        "in order",
    ),
    (
        CHAT,
        CALL_STREAM,
        sse(ROLE, chunk({"tool_calls": [{**NAMED_CALL, "function": {}}]}), END, "[DONE]"),
        "no name",
    ),
    (
        CHAT,
        CALL_STREAM,
        sse(
            ROLE,
            chunk({"tool_calls": [NAMED_CALL]}),
            chunk({"tool_calls": [NAMED_CALL]}),
            END,
            "[DONE]",
        ),
        "name comes twice",
    ),
    (
        CHAT,
        CALL_STREAM,
        sse(
            ROLE,
            chunk({"tool_calls": [NAMED_CALL]}),
            chunk({"tool_calls": [{**MORE_CALL, "id": "2"}]}),
            END,
            "[DONE]",
        ),
        "id changes",
    ),
]


@pytest.mark.parametrize("name", GOOD_STREAMS)
def test_good_stream(name: str) -> None:
    check(*GOOD_STREAMS[name])


@pytest.mark.parametrize(
    ("path", "request_", "body", "message"),
    BAD_STREAMS,
    ids=[f"{i}-{row[3]}" for i, row in enumerate(BAD_STREAMS)],
)
def test_bad_stream(path: str, request_: Json, body: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        check(path, request_, body)


def test_a_client_that_hangs_up_is_owed_no_end() -> None:
    path, request, body = GOOD_STREAMS["chat"]
    for length in range(len(body)):
        check(path, request, body[:length], complete=False)
    with pytest.raises(ShapeError, match="abort"):
        check(CHAT, CHAT_STREAM, sse(ROLE, chunk({}, "abort")), complete=False)
