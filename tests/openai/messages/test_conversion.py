"""What the model reads: each form of a conversation gives the prompt of a chat with the same meaning."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.serve.openai.schema.results import text_of_url
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.chats import HERMES
from tests.openai.messages.talks import COUNT, TOOLS, Talk, talk
from tests.serve.played import saying, user

CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
CHAT_CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
DOCUMENT = {
    "type": "document",
    "title": "T",
    "context": "C",
    "source": {"type": "text", "media_type": "text/plain", "data": "seen"},
}
FOUND = {
    "type": "search_result",
    "title": "T",
    "source": "https://x",
    "content": [{"type": "text", "text": "seen"}],
}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def user_of(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def chat_tool(input_schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**fields, "parameters": input_schema}}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "toolu_1", "content": content}


# a call of /v1/messages, and the chat with the same prompt
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "string": ({"messages": [user("hi")]}, {"messages": [user("hi")]}),
    "blocks": (
        {"messages": [{"role": "user", "content": text("a", "b")}]},
        {"messages": [user("a\nb")]},
    ),
    "system string": (
        {"system": "Be brief.", "messages": [user("hi")]},
        {"messages": [system("Be brief."), user("hi")]},
    ),
    "system blocks": (
        {"system": text("Be", "brief."), "messages": [user("hi")]},
        {"messages": [system("Be\nbrief."), user("hi")]},
    ),
    "billing header": (
        {"system": [BILLING, *text("Be brief.")], "messages": [user("hi")]},
        {"messages": [system("Be brief."), user("hi")]},
    ),
    "billing header alone": (
        {"system": [BILLING], "messages": [user("hi")]},
        {"messages": [user("hi")]},
    ),
    "system messages first": (
        {"system": "A", "messages": [system("B"), user("hi")]},
        {"messages": [system("A\n\nB"), user("hi")]},
    ),
    "a system message of one turn": (
        {
            "messages": [
                user("a"),
                {**system("S"), "clear_at": "next_user_message"},
                user("b"),
                {**system("T"), "clear_at": "next_user_message"},
            ]
        },
        {"messages": [user("a\nb"), system("T")]},
    ),
    "roles in a row": (
        {"messages": [user("a"), user("b"), assistant("c"), assistant(text("d")), user("e")]},
        {"messages": [user("a\nb"), assistant("c\nd"), user("e")]},
    ),
    "three turns with tools": (
        {
            "tools": TOOLS,
            "messages": [
                user("?"),
                assistant([*text("I look."), CALL]),
                {"role": "user", "content": [{**RESULT, "is_error": True}, *text("Go on.")]},
                assistant([CALL]),
                {"role": "user", "content": [{**RESULT, "content": text("ra", "in")}]},
            ],
        },
        {
            "tools": [chat_tool(**tool) for tool in TOOLS],
            "messages": [
                user("?"),
                assistant("I look.", tool_calls=[CHAT_CALL]),
                tool("rain"),
                user("Go on."),
                assistant("", tool_calls=[CHAT_CALL]),
                tool("ra\nin"),
            ],
        },
    ),
    "results come first in their turn": (
        {
            "messages": [
                user("?"),
                assistant([CALL]),
                user("Here it is."),
                {"role": "user", "content": [RESULT]},
            ]
        },
        {
            "messages": [
                user("?"),
                assistant("", tool_calls=[CHAT_CALL]),
                tool("rain"),
                user("Here it is."),
            ]
        },
    ),
    "a result without content": (
        {
            "messages": [
                user("?"),
                assistant([CALL]),
                {"role": "user", "content": [{**RESULT, "content": None}]},
            ]
        },
        {"messages": [user("?"), assistant("", tool_calls=[CHAT_CALL]), tool("")]},
    ),
    "a document of text": (
        {"messages": [{"role": "user", "content": [DOCUMENT, *text("?")]}]},
        {"messages": [user("T\nC\nseen\n?")]},
    ),
    "a document in blocks": (
        {
            "messages": [
                user_of(
                    {"type": "document", "source": {"type": "content", "content": text("a", "b")}}
                )
            ]
        },
        {"messages": [user("a\nb")]},
    ),
    "a search result": ({"messages": [user_of(FOUND)]}, {"messages": [user("T\nhttps://x\nseen")]}),
    "a text in base64": (
        {"messages": [user_of({**DOCUMENT, "source": {**PDF, "media_type": "text/plain"}})]},
        {"messages": [user("T\nC\nhi")]},
    ),
    "continued": (
        {"messages": [user("Count."), assistant("One, ")]},
        {
            "messages": [user("Count."), assistant("One, ")],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "thinking given back": (
        {
            "messages": [
                user("?"),
                assistant(
                    [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "d"},
                        *text("Yes."),
                    ]
                ),
                user("!"),
            ]
        },
        {"messages": [user("?"), assistant("Yes.", reasoning_content="Hm."), user("!")]},
    ),
    "variables": (
        {
            "messages": [user("?")],
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
        },
        {"messages": [user("?")], "enable_thinking": False, "reasoning_effort": "low"},
    ),
    "thinking on": (
        {"messages": [user("?")], "thinking": {"type": "adaptive"}},
        {"messages": [user("?")], "enable_thinking": True},
    ),
}
# Shows everything that a template can see.
TEMPLATE = """{{ enable_thinking }} {{ reasoning_effort | default("-") }} {{ tools | tojson }}
{% for message in messages %}
<{{ message.role }}>{{ message.reasoning_content }}|{{ message.content }}|
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{%- if message.tool_call_id %}{{ message.tool_call_id }}{% endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    """A server with a template that shows everything."""
    path = tmp_path_factory.mktemp("template") / "all.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return ServerConfig(EngineConfig(model="m"), chat_template=str(path), tool_call_parser="hermes")


@pytest.mark.conforms("messages.messages", "messages.system", "messages.tools", "messages.thinking")
@pytest.mark.conforms(
    "messages.output_config", "messages.chat_template_kwargs", "POST /v1/messages/count_tokens"
)
def test_prompts_are_those_of_chats(shown: ServerConfig) -> None:
    async def act(found: Talk) -> None:
        for name, (fields, chat) in CASES.items():
            prompt = await found.prompt(**fields)
            assert prompt == await found.chat_prompt(**chat), name
            counted = await found.post(COUNT, **fields)
            assert counted.json() == {"input_tokens": len(found.link.submitted[-1].prompt_ids)}, (
                name
            )
        fields = {"messages": [user("?")], "chat_template_kwargs": {"reasoning_effort": "x"}}
        assert " x " in await found.prompt(**fields)

    talk(act, config=shown)


def test_system_messages_in_the_middle(tmp_path: Path, shown: ServerConfig) -> None:
    """A later one stays if the template renders it. Otherwise its text goes before that of the next user message."""
    messages = [
        user("a"),
        assistant("b"),
        system("S"),
        user("c"),
        assistant("d"),
        user("e"),
        system("T"),
    ]

    async def act(found: Talk) -> str:
        return await found.prompt(messages=messages)

    kept = talk(act, config=shown)
    assert (
        "<system>|S|" in kept
        and "<user>|c|" in kept
        and kept.index("|e|") < kept.index("<system>|T|")
    )
    path = tmp_path / "first_only.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}",
        encoding="utf-8",
    )
    moved = talk(act, config=ServerConfig(EngineConfig(model="m"), chat_template=str(path)))
    assert moved == "<user>a<assistant>b<user>S\n\nc<assistant>d<user>e\n\nT"


@pytest.mark.conforms("messages.tool_choice")
def test_tool_choice() -> None:
    async def act(found: Talk) -> None:
        async def told(**choice: Any) -> Any:
            await found.post(tools=TOOLS, tool_choice=choice)
            return found.link.submitted[-1]

        assert (await told(type="auto")).params.structured is None
        forced = (await told(type="any")).params.structured
        assert forced is not None and "weather" in forced.value and "clock" in forced.value
        assert '"maxItems"' not in forced.value
        single = (await told(type="any", disable_parallel_tool_use=True)).params.structured
        assert '"maxItems":1' in single.value
        named = (await told(type="tool", name="weather")).params.structured
        assert "Oslo" in named.value and "clock" not in named.value
        assert b"weather" not in bytes((await told(type="none")).prompt_ids)
        for choice, param in (
            ({"type": "tool", "name": "other"}, "'other'"),
            ({"type": "tool"}, "tool_choice.name"),
        ):
            answer = await found.post(tools=TOOLS, tool_choice=choice)
            assert answer.status_code == 400 and param in answer.json()["error"]["message"]

    talk(act, saying("x"), HERMES)


def test_a_tool_may_have_a_long_name() -> None:
    async def act(found: Talk) -> None:
        name = "mcp__" + "x" * 123
        answer = await found.post(tools=[{"name": name, "input_schema": {"type": "object"}}])
        assert answer.status_code == 200 and name.encode() in bytes(
            found.link.submitted[-1].prompt_ids
        )

    talk(act, config=HERMES)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages: "),
        ([user("?"), assistant([CALL])], "messages[1]: the results of its tool calls must follow"),
        ([user("?"), assistant("")], "messages[1]: the last message of the assistant has no text"),
        (
            [user("?"), assistant([{"type": "thinking", "thinking": "x", "signature": ""}])],
            "messages[1]: the last",
        ),
        ([system("")], "messages has no text"),
        (
            [{"role": "user", "content": [CALL]}],
            "messages[0].content[0]: a message of the role user cannot have",
        ),
        (
            [assistant([RESULT]), user("x")],
            "messages[0].content[0]: a message of the role assistant cannot have",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].role: must be user, assistant or system"),
        (
            [{"role": "user", "content": [{"type": "image", "source": {}}]}],
            "images are not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "document", "source": {}}]}],
            "documents other than texts are",
        ),
        (
            [{"role": "user", "content": [{**DOCUMENT, "source": PDF}]}],
            "documents other than texts are not supported",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{**DOCUMENT, "source": {"type": "content", "content": [IMAGE]}}],
                }
            ],
            "messages[0].content[0].source.content[0].type: images are not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "search_result"}]}],
            "messages[0].content[0].content is required",
        ),
        (
            [{"role": "user", "content": [{"type": "document"}]}],
            "messages[0].content[0].source is required",
        ),
        (
            [
                user("?"),
                assistant([CALL]),
                {"role": "user", "content": [{**RESULT, "content": [{"type": "audio"}]}]},
            ],
            "messages[2].content[0].content[0].type: blocks of type 'audio' are not supported",
        ),
        (
            [assistant([DOCUMENT]), user("x")],
            "messages[0].content[0]: a message of the role assistant cannot have",
        ),
        (
            [{"role": "user", "content": [{"type": "server_tool_use", "id": "x"}]}],
            "type 'server_tool_use' are not",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": None}], "messages[0].content"),
    ],
)
def test_wrong_messages_are_named(messages: list[Any], complaint: str) -> None:
    async def act(found: Talk) -> None:
        for path in ("/v1/messages", COUNT):
            answer = await found.post(path, messages=messages)
            assert answer.status_code == 400 and complaint in answer.json()["error"]["message"], (
                answer.text
            )
        assert not found.link.submitted

    talk(act, chats=False)


PARTS_OF_RESULTS = pytest.mark.parametrize(
    ("part", "read", "named"),
    [
        (IMAGE, "[image left out: the model reads text only]", "image"),
        (
            {"type": "document", "source": PDF},
            "[document left out: the model reads text only]",
            "document",
        ),
        (
            {"type": "tool_reference", "tool_name": "f"},
            "[tool_reference left out",
            "tool_reference",
        ),
        (DOCUMENT, "T\nC\nseen", None),
        (FOUND, "T\nhttps://x\nseen", None),
        (
            {"type": "document", "source": {"type": "content", "content": [*text("seen"), IMAGE]}},
            "seen\n[image left out",
            "source.content.image",
        ),
    ],
)


def test_each_kind_that_is_left_out_is_named_once(shown: ServerConfig) -> None:
    result = {**RESULT, "content": [IMAGE] * 9}

    async def act(found: Talk) -> None:
        answer = await found.post(messages=[user("?"), assistant([CALL]), user_of(result)])
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-orca-ignored-fields"] == "messages.content.content.image"

    talk(act, config=shown)


@pytest.mark.conforms("messages.messages", "messages.without effect")
@PARTS_OF_RESULTS
def test_what_a_tool_returns_never_ends_the_conversation(
    shown: ServerConfig, part: dict[str, Any], read: str, named: str | None
) -> None:
    """A result stays in all later calls, so that a refusal would refuse all of them."""
    result = {**RESULT, "content": [*text("It is here."), part]}
    messages = [user("?"), assistant([CALL]), user_of(result), assistant("Fine."), user("And now?")]

    async def act(found: Talk) -> None:
        answer = await found.post(messages=messages)
        assert answer.status_code == 200, answer.text
        assert f"It is here.\n{read}" in bytes(found.link.submitted[-1].prompt_ids).decode()
        header = answer.headers.get("x-orca-ignored-fields")
        assert header == (None if named is None else f"messages.content.content.{named}")
        assert (await found.post(COUNT, messages=messages)).status_code == 200

    talk(act, config=shown)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("data:text/plain;base64,aGk=", "hi"),
        ("data:text/plain,hi", None),
        ("data:image/png;base64,aGk=", None),
        ("data:text/plain;base64,/w==", None),
        ("https://page.example/a.txt", None),
    ],
)
def test_the_text_of_an_address(url: str, text: str | None) -> None:
    assert text_of_url(url) == text
