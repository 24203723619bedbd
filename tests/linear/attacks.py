"""Bodies that are as hard as their size allows, by route."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from orca_jax.serve.openai.schema.limits import MAX_MESSAGES

USER = {"role": "user", "content": "x"}
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content.split('</think>') | last }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
"""A chat template that changes the messages of the assistant, as those of reasoning models do."""


class Attack(NamedTuple):
    """A body of about so many bytes, for a route."""

    path: str
    body: Callable[[int], bytes]


def chat(size: int, **fields: Any) -> bytes:
    return json.dumps({"max_tokens": 1, "messages": [USER], **fields}).encode()


def formatted(schema: object) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return json.dumps({"max_tokens": 1, "messages": [USER], "response_format": form}).encode()


def names(size: int) -> str:
    return ",".join([f'"{number:x}":1' for number in range(size // 9)])


def late_systems(size: int) -> bytes:
    text = "x" * max(1, size // MAX_MESSAGES - 40)
    return chat(size, messages=[USER, *[{"role": "system", "content": text}] * (MAX_MESSAGES - 1)])


def continued(size: int) -> bytes:
    turns = [
        {"role": "user", "content": "a" * (size * 3 // 4)},
        {"role": "assistant", "content": ""},
    ]
    turns[1]["content"] = "aa</think>" + "a" * (size // 4)
    return chat(size, messages=turns, continue_final_message=True, add_generation_prompt=False)


def union(size: int) -> bytes:
    return formatted(
        {"oneOf": [{"enum": [0, *range(i * 20 + 1, i * 20 + 20)]} for i in range(size // 130)]}
    )


def chain(size: int) -> bytes:
    count = size // 40
    places = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} if i < count - 1 else {} for i in range(count)}
    return formatted(
        {"properties": {"x": {"$ref": "#/$defs/a0"}}, "required": ["x"], "$defs": places}
    )


def tools(size: int) -> bytes:
    parameters = {
        "properties": {
            f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(size // 128 // 45)
        }
    }
    made = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(128)
    ]
    return chat(size, tools=made, tool_choice="required")


def parts(size: int) -> bytes:
    part = {"type": "text", "text": "x"}
    turns = [{"role": "user", "content": [part] * 250}] * (size // 250 // 32 + 1)
    return json.dumps({"max_tokens": 1, "messages": turns}).encode()


ATTACKS: Mapping[str, Attack] = {
    "names beside an escape": Attack(
        "/v1/completions", lambda size: f'{{"prompt":"\\u0041",{names(size)}}}'.encode()
    ),
    "a name twice": Attack(
        "/v1/completions", lambda size: f'{{"prompt":"x",{names(size)},"0":2}}'.encode()
    ),
    "logit_bias": Attack(
        "/v1/completions", lambda size: f'{{"prompt":"x","logit_bias":{{{names(size)}}}}}'.encode()
    ),
    "ids": Attack("/v1/completions", lambda size: b'{"prompt":[' + b"1," * (size // 2) + b"1]}"),
    "floats": Attack(
        "/v1/completions", lambda size: b'{"prompt":[' + b"1.0," * (size // 4) + b"1]}"
    ),
    "a text": Attack("/tokenize", lambda size: b'{"prompt":"' + b"x" * size + b'"}'),
    "ids to show": Attack(
        "/detokenize", lambda size: b'{"tokens":[' + b"1," * min(size // 2, 2**20 - 1) + b"1]}"
    ),
    "names of tokens": Attack(
        "/tokenize", lambda size: b'{"return_token_strs":true,"prompt":"' + b"x" * size + b'"}'
    ),
    "late system messages": Attack(CHAT, late_systems),
    "a message to continue": Attack(CHAT, continued),
    "a union": Attack(CHAT, union),
    "a chain of references": Attack(CHAT, chain),
    "tools": Attack(CHAT, tools),
    "blocks": Attack("/v1/messages", parts),
    "items": Attack(
        "/v1/responses",
        lambda size: json.dumps({"input": [USER] * min(size // 40, MAX_MESSAGES)}).encode(),
    ),
    "a long instruction": Attack(
        "/v1/responses",
        lambda size: json.dumps({"input": "x", "instructions": "y" * size}).encode(),
    ),
}
