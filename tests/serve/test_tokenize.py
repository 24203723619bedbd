"""`/tokenize` and `/detokenize`, in vLLM's format, and prompts of calls as ids and as text."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.openai.test_bad_input import check_error
from tests.serve.played import Stage, on_stage, saying
from tests.serve.running import MODEL, Server


def post(server: Server, path: str, **fields: Any) -> Any:
    return server.http.post(path, json=fields)


@pytest.mark.conforms("POST /tokenize", "POST /detokenize", "tokenize.model", "tokenize.prompt")
@pytest.mark.conforms("tokenize.return_token_strs", "detokenize.tokens")
def test_there_and_back(server: Server) -> None:
    answer = post(server, "/tokenize", model=MODEL, prompt="naïve", return_token_strs=True).json()
    assert (
        answer["tokens"] == list("naïve".encode())
        and answer["count"] == 6
        and answer["max_model_len"] == 8192
    )
    assert answer["token_strs"] == ["n", "a", "bytes:\\xc3", "bytes:\\xaf", "v", "e"]
    assert post(server, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "naïve"}
    assert post(server, "/detokenize", tokens=[65, 256, 0xFF]).json() == {
        "prompt": "A<|end|>\ufffd"
    }
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}
    assert post(server, "/tokenize", prompt="").json()["tokens"] == []


@pytest.mark.conforms("tokenize.messages", "tokenize.tools", "tokenize.add_generation_prompt")
def test_a_conversation_counts_what_its_completion_will(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    messages = [{"role": "user", "content": "How many tokens?"}]
    for fields in ({"messages": messages}, {"messages": messages, "tools": tools}):
        count = post(server, "/tokenize", **fields).json()["count"]
        choice = {"tool_choice": "required"} if "tools" in fields else {}
        body = {"model": MODEL, "max_tokens": 1, "ignore_eos": True, **fields, **choice}
        assert (
            server.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
            == count
        )
    shorter = post(server, "/tokenize", messages=messages, add_generation_prompt=False).json()[
        "count"
    ]
    assert shorter < post(server, "/tokenize", messages=messages).json()["count"]


@pytest.mark.conforms("tokenize.model", "detokenize.tokens")
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x", "return_tokens": True}, "return_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "65"}, "tokens"),
    ],
)
def test_what_is_refused(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    assert check_error(post(server, path, **fields))["param"] == param


@pytest.mark.conforms("POST /v1/completions/render", "POST /v1/chat/completions/render")
def test_rendered_prompts_are_those_of_the_completion(server: Server) -> None:
    (answer,) = post(server, "/v1/completions/render", model=MODEL, prompt="hi", stream=True).json()
    assert answer == {
        "request_id": answer["request_id"],
        "token_ids": [104, 105],
        "features": None,
        "model": MODEL,
    }
    several = post(server, "/v1/completions/render", prompt=[[1, 2], [3]]).json()
    assert [one["token_ids"] for one in several] == [[1, 2], [3]]
    messages = [{"role": "user", "content": "How many tokens?"}]
    chat = post(server, "/v1/chat/completions/render", model=MODEL, messages=messages).json()
    assert chat["token_ids"] == post(server, "/tokenize", messages=messages).json()["tokens"]
    wrong = post(server, "/v1/chat/completions/render", messages=messages, temperature=-1)
    assert check_error(wrong)["param"] == "temperature"


@pytest.mark.conforms("POST /apply-template")
def test_the_text_of_a_prompt_is_that_of_its_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "How many tokens?"}]
    tools = [{"type": "function", "function": {"name": "clock"}}]
    for fields in (
        {},
        {"tools": tools, "tool_choice": "required"},
        {"add_generation_prompt": False},
    ):
        (text,) = (
            post(server, "/apply-template", model=MODEL, messages=messages, **fields)
            .json()
            .values()
        )
        ids = post(server, "/v1/chat/completions/render", messages=messages, **fields).json()[
            "token_ids"
        ]
        assert list(text.encode()) == ids and messages[0]["content"] in text
    answer = post(server, "/apply-template", messages=messages, reasoning_effort="low")
    assert answer.headers["x-orca-ignored-fields"] == "reasoning_effort"
    assert (
        check_error(post(server, "/apply-template", messages=messages, model="other"), 404)["param"]
        == "model"
    )


def test_many_ids_become_text_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million ids would stop the streams of others."""
    threads = []

    def decode(self: Any, ids: Sequence[int], **options: Any) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return str(len(ids))

    async def act(stage: Stage) -> None:
        monkeypatch.setattr(type(stage.service.model.tokenizer), "decode", decode)
        async with stage.http() as http:
            for count in (10, 100_000):
                answer = await http.post("/detokenize", json={"tokens": [65] * count})
                assert answer.json() == {"prompt": str(count)}

    on_stage(saying("x"), act)
    assert threads == [True, False]
