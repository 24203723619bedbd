"""OpenAI's client against `/v1/responses`: three turns that the server keeps or the client sends again, and routes."""

import json
from typing import Any

import httpx2
import openai
import pytest

from orca_jax.link.wire import Submit
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.chats import CALL
from tests.openai.responses.played import (
    FUNCTION,
    client_of,
    events_of,
    prompt_of,
    strictly,
    with_client,
)
from tests.serve.played import News, Stage, on_stage, saying

TURNS = (f"I look. {CALL}", "It rains.", "Yes.")
KEYS = ServerConfig(EngineConfig(model="m"), api_key=("a", "b"))
NO_STORE = ServerConfig(EngineConfig(model="m"), responses_store=0)


class Turns:
    """An engine that answers each call with the next text."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)

    def __call__(self, submit: Submit) -> list[News]:
        return list(saying(next(self._texts))(submit))


def result(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    """The response at the end of a stream, as the client's own accumulator makes it."""
    async with client.responses.stream(model="m", **fields) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def create(client: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> Any:
    if stream:
        return await streamed(client, **fields)
    response = await client.responses.create(model="m", **fields)
    strictly(response)
    return response


@pytest.mark.conforms("responses.previous_response_id", "responses.store")
@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_with_a_tool_that_the_server_keeps(stream: bool) -> None:
    async def act(client: openai.AsyncOpenAI, stage: Stage) -> None:
        tools: Any = [FUNCTION]
        first = await create(
            client, stream=stream, input="Rain in Oslo?", tools=tools, instructions="be brief"
        )
        assert first.output_text == "I look. "
        call = first.output[1]
        assert json.loads(call.arguments) == {"city": "Oslo"}
        second = await create(
            client, stream=stream, input=[result(call)], tools=tools, previous_response_id=first.id
        )  # fmt: skip
        assert second.output_text == "It rains." and second.previous_response_id == first.id
        third = await create(client, stream=stream, input="Sure?", previous_response_id=second.id)
        assert third.output_text == "Yes."
        prompt = prompt_of(stage.link)
        places = [
            prompt.index(text)
            for text in ("Rain in Oslo?", "I look.", "rain", "It rains.", "Sure?")
        ]
        assert places == sorted(places) and "be brief" not in prompt, (
            "instructions are not inherited"
        )
        assert "be brief" in prompt_of(stage.link, 0) and prompt.count("Rain in Oslo?") == 1

    with_client(Turns(*TURNS), act)


@pytest.mark.conforms("responses.input", "responses.store")
@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_with_a_tool_that_the_client_sends_again(stream: bool) -> None:
    async def act(client: openai.AsyncOpenAI, stage: Stage) -> None:
        fields: dict[str, Any] = {"tools": [FUNCTION], "store": False, "stream": stream}
        items: list[Any] = [{"role": "user", "content": "Rain in Oslo?"}]
        first = await create(client, input=items, **fields)
        items += [item.model_dump(exclude_unset=True) for item in first.output]
        items.append(result(first.output[1]))
        second = await create(client, input=items, **fields)
        items += [*second.output, {"role": "user", "content": "Sure?"}]
        third = await create(client, input=items, **fields)
        assert third.output_text == "Yes."
        prompt = prompt_of(stage.link)
        assert prompt.count("I look.") == 1 and prompt.index("rain") < prompt.index("It rains.")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)

    with_client(Turns(*TURNS), act)


@pytest.mark.conforms("responses.input")
def test_items_are_found_by_their_ids() -> None:
    async def act(client: openai.AsyncOpenAI, stage: Stage) -> None:
        first = await client.responses.create(model="m", input="Rain?")
        refs: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
        items: Any = [
            {"role": "user", "content": "Rain?"},
            *refs,
            {"role": "user", "content": "Sure?"},
        ]
        await client.responses.create(model="m", input=items)
        assert prompt_of(stage.link).count("It rains.") == 1
        short: Any = [{"id": first.output[0].id}, {"role": "user", "content": "x"}]
        await client.responses.create(model="m", input=short)
        with pytest.raises(openai.BadRequestError, match=r"refers to item .* 2 times"):
            await client.responses.create(model="m", input=[*refs, *refs])
        lost: Any = [{"type": "item_reference", "id": "msg_lost"}]
        with pytest.raises(openai.NotFoundError, match="msg_lost"):
            await client.responses.create(model="m", input=lost)

    with_client(Turns("It rains.", "Yes.", "x"), act)


@pytest.mark.conforms("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}")
@pytest.mark.conforms(
    "GET /v1/responses/{response_id}/input_items", "POST /v1/responses/input_tokens"
)
def test_the_routes_of_stored_responses() -> None:
    async def act(client: openai.AsyncOpenAI, stage: Stage) -> None:
        texts: Any = [{"role": "user", "content": text} for text in ("a", "b", "c")]
        items: Any = [
            *texts, {"role": "assistant", "content": "d"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "e"},
            {"type": "reasoning", "id": "rs_mine", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        ]  # fmt: skip
        made = await client.responses.create(model="m", input=items, metadata={"k": "v"})
        again = await client.responses.retrieve(made.id)
        assert again.model_dump() == made.model_dump()
        page = await client.responses.input_items.list(made.id, order="asc")
        strictly(page.data)
        kinds = [(item.type, item.id is not None) for item in page.data]
        names = ["message"] * 4 + ["function_call", "function_call_output", "reasoning"]
        assert kinds == [(name, True) for name in names] and page.data[-1].id == "rs_mine"
        found = [item.id async for item in client.responses.input_items.list(made.id, limit=2)]
        assert found == [item.id for item in page.data][::-1], "the newest first, page by page"
        assert await client.responses.delete(made.id) is None
        with pytest.raises(
            openai.NotFoundError, match=r"Response with id .* not found.*--responses-store"
        ):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="x", previous_response_id=made.id)
        assert (
            caught.value.code == "previous_response_not_found"
            and caught.value.param == "previous_response_id"
        )
        count = await client.responses.input_tokens.count(model="m", input=items)
        assert count.input_tokens == made.usage.input_tokens  # type: ignore[union-attr]
        assert len(stage.link.submitted) == 1, "tokens are counted without the engine"

    with_client(saying("x"), act)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", f"limit={'9' * 5000}", "order=up", "after=msg_lost"]
)
def test_a_wrong_page_is_refused(query: str) -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            made = (await http.post("/v1/responses", json={"input": "x"})).json()
            answer = await http.get(f"/v1/responses/{made['id']}/input_items?{query}")
            assert (
                answer.status_code == 400
                and answer.json()["error"]["param"] == query.partition("=")[0]
            )
            answer = await http.get(f"/v1/responses/{made['id']}?stream=true")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"

    on_stage(saying("x"), act, chats=True)


def test_routes_that_are_not_there_answer_404() -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            answers = [
                await http.get(
                    "/v1/responses", headers={"connection": "upgrade", "upgrade": "websocket"}
                ),
                await http.post("/v1/responses/compact", json={"input": "x"}),
                await http.post("/v1/responses/resp_1/cancel", json={}),
                await http.get("/v1/responses/resp_1"),
            ]
            assert [answer.status_code for answer in answers] == [404] * 4
            for wrong, allowed in (
                (http.get("/v1/responses"), "POST"),
                (http.post("/v1/responses/x"), "DELETE, GET"),
            ):
                answer = await wrong
                assert answer.status_code == 405
                assert set(allowed.split(", ")) <= set(answer.headers["allow"].split(", "))

    on_stage(saying("x"), act, chats=True)


@pytest.mark.parametrize("key", ["b", None])
def test_a_response_belongs_to_its_key(key: str | None) -> None:
    async def act(stage: Stage) -> None:
        transport = httpx2.ASGITransport(stage.app)
        async with httpx2.AsyncClient(transport=transport) as http:
            mine = client_of(http, "a")
            made = await mine.responses.create(model="m", input="secret")
            other: Any = client_of(http, key or "wrong")
            refusal = openai.NotFoundError if key else openai.AuthenticationError
            for act in (
                other.responses.retrieve,
                other.responses.delete,
                other.responses.input_items.list,
            ):
                with pytest.raises(refusal):
                    await act(made.id)
            item: Any = [{"type": "item_reference", "id": made.output[0].id}]
            with pytest.raises(refusal):
                await other.responses.create(model="m", input=item)
            with pytest.raises(openai.BadRequestError if key else refusal):
                await other.responses.create(model="m", input="x", previous_response_id=made.id)
            assert (await mine.responses.retrieve(made.id)).id == made.id

    on_stage(saying("x"), act, KEYS, chats=True)


def test_a_server_without_a_store() -> None:
    async def act(client: openai.AsyncOpenAI, stage: Stage) -> None:
        raw = await client.responses.with_raw_response.create(model="m", input="x", store=True)
        assert raw.headers["x-orca-ignored-fields"] == "store"
        with pytest.raises(openai.NotFoundError, match="--responses-store 0"):
            await client.responses.retrieve(raw.parse().id)

    with_client(saying("x"), act, NO_STORE)


def test_a_page_of_another_origin_may_delete() -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            headers = {"origin": "http://page.example", "access-control-request-method": "DELETE"}
            answer = await http.options("/v1/responses/resp_1", headers=headers)
            assert (
                answer.status_code == 200
                and "DELETE" in answer.headers["access-control-allow-methods"]
            )

    on_stage(
        saying("x"),
        act,
        ServerConfig(EngineConfig(model="m"), allowed_origins=("http://page.example",)),
    )


@pytest.mark.conforms("responses.text", "responses.truncation")
def test_parsed_formats_and_long_prompts() -> None:
    async def act(client: openai.AsyncOpenAI, stage: Stage) -> None:
        from pydantic import BaseModel

        class Weather(BaseModel):
            rain: bool

        parsed = await client.responses.parse(model="m", input="x", text_format=Weather)
        assert parsed.output_parsed == Weather(rain=True)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="x" * 3000)
        assert caught.value.code == "context_length_exceeded"
        async with client.responses.stream(model="m", input="x" * 3000) as stream:
            kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.failed"

    with_client(saying('{"rain": true}'), act)


def test_events_come_as_they_are_generated() -> None:
    """A stream of the HTTP answer is what the client sees, and no `[DONE]` follows."""

    async def act(stage: Stage) -> str:
        async with stage.http() as http:
            return (await http.post("/v1/responses", json={"input": "x", "stream": True})).text

    text = on_stage(saying("a", "b"), act, chats=True)
    assert events_of(text)[-1]["type"] == "response.completed" and "[DONE]" not in text
