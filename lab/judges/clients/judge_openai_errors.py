"""openai-python's typed exceptions: the exception of each mistake, the parameter's name, and retries."""

from typing import Any

import openai

from lab.judges.clients.checks import catch, expect

__all__ = ["ERRORS"]

NUM_ROWS = 4  # rows of the server


def bad_values_name_their_parameter(s: Any) -> None:
    for param, value in (
        ("temperature", 3),
        ("top_p", 0),
        ("max_tokens", -2),
        ("n", 100_000),
        ("stop", [""]),
    ):
        error = catch(openai.BadRequestError, s.complete, **{param: value})
        expect(
            (error.param or "").startswith(param), f"{param}: {error.param!r} is named in {error}"
        )
        expect(error.type == "invalid_request_error", f"{error.type}")
        expect(error.code is None or isinstance(error.code, str), f"{error.code!r}")


def unknown_parameter(s: Any) -> None:
    error = catch(openai.BadRequestError, s.complete, extra_body={"temprature": 1})
    expect(error.param == "temprature", f"{error}")


def bad_chat(s: Any) -> None:
    for param, value in (
        ("messages", []),
        ("temperature", 3),
        ("top_logprobs", 1000),
        ("tool_choice", "required"),
    ):
        error = catch(openai.BadRequestError, s.chat, **{param: value})
        expect(error.param == param, f"{param}: {error.param!r} is named in {error}")


def bad_schema(s: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    error = catch(openai.BadRequestError, s.chat, response_format=schema, max_tokens=5)
    expect(
        (error.param or "").startswith("response_format"), f"{error.param!r} is named in {error}"
    )


def too_long(s: Any) -> None:
    error = catch(openai.BadRequestError, s.complete, prompt=[1] * 200_000)
    expect(error.code == "context_length_exceeded", f"{error}")


def stream_errors_before_the_first_byte(s: Any) -> None:
    error = catch(openai.BadRequestError, s.complete, stream=True, top_p=7)
    expect(error.param == "top_p", f"{error}")
    error = catch(openai.BadRequestError, s.complete, stream_options={"include_usage": True})
    expect(error.param == "stream_options", f"{error}")


def unauthorized(s: Any) -> None:
    stranger = s.client.with_options(api_key="not-the-key")
    error = catch(openai.AuthenticationError, stranger.models.list)
    expect(error.type == "authentication_error" and isinstance(error.code, str | None), f"{error}")
    catch(
        openai.AuthenticationError, stranger.completions.create, model=s.settings.model, prompt="x"
    )


def unknown_model(s: Any) -> None:
    for call, fields in (
        (s.client.completions.create, {"prompt": "x"}),
        (s.client.chat.completions.create, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        error = catch(openai.NotFoundError, call, model="missing", **fields)
        expect(error.code == "model_not_found" and error.param == "model", f"{error}")
    catch(openai.NotFoundError, s.client.models.retrieve, model="missing")


def unknown_route(s: Any) -> None:
    catch(openai.NotFoundError, s.client.moderations.create, model=s.settings.model, input="x")


def count_sent(s: Any, kind: type[openai.OpenAIError], retries: int, **fields: Any) -> int:
    """The number of times that the client sends a request with this exception, at most `retries` + 1."""
    sent: list[Any] = []
    client = s.client.with_options(max_retries=retries)
    client._client.event_hooks = {"request": [sent.append], "response": []}
    try:
        catch(
            kind, client.completions.create, **{"model": s.settings.model, "prompt": "x", **fields}
        )
    finally:
        client._client.event_hooks = {"request": [], "response": []}
    return len(sent)


def mistakes_are_not_retried(s: Any) -> None:
    expect(count_sent(s, openai.BadRequestError, 3, temperature=9) == 1, "a mistake was sent again")


def spent_deadlines_are_not_retried(s: Any) -> None:
    body = {"timeout": 0.05, "ignore_eos": True}
    sent = count_sent(s, openai.APIStatusError, 3, max_tokens=4000, extra_body=body)
    expect(sent == 1, f"a request past its deadline was sent {sent} times")


def a_busy_server_is_asked_again(s: Any) -> None:
    long = {"stream": True, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
    streams = [s.complete(**long) for _ in range(NUM_ROWS)]
    try:
        for stream in streams:
            next(iter(stream))  # it runs
        sent = count_sent(s, openai.InternalServerError, 1, extra_body={"queue_timeout": 0.05})
    finally:
        for stream in streams:
            stream.close()
    expect(sent == 2, f"503 with retry-after was sent {sent} times")


ERRORS = [
    bad_values_name_their_parameter,
    unknown_parameter,
    bad_chat,
    bad_schema,
    too_long,
    stream_errors_before_the_first_byte,
    unauthorized,
    unknown_model,
    unknown_route,
    mistakes_are_not_retried,
    spent_deadlines_are_not_retried,
    a_busy_server_is_asked_again,
]
