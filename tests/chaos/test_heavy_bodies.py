"""JSON of thirty megabytes in several shapes, just below the limit: refused by name, while other streams continue."""

from collections.abc import Callable

import psutil
import pytest

from tests.chaos.world import Watch, check_error, post_raw
from tests.serve.running import Server

MIB = 2**20
SIZE = 31 * MIB
COMPLETIONS, CHAT, AGENT = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"
MESSAGES = b'"messages": [{"role": "user", "content": "x"}]'


def repeated(start: bytes, item: bytes, end: bytes) -> bytes:
    """`{"model": ..., START ITEM,ITEM,... END}`, of the size above."""
    start = b'{"model": "preset:toy", ' + start
    return (
        start + b",".join([item] * ((SIZE - len(start) - len(end)) // (len(item) + 1))) + end + b"}"
    )


def numbered(start: bytes, end: bytes, value: bytes) -> bytes:
    """An object with as many different names as fit."""
    names = b",".join(b'"%d":%s' % (i, value) for i in range(SIZE // (len(value) + 11)))
    return b'{"model": "preset:toy", ' + start + b"{" + names + b"}" + end + b"}"


def text(start: bytes, end: bytes) -> bytes:
    return b'{"model": "preset:toy", ' + start + b'"' + b"x" * (SIZE - 200) + b'"' + end + b"}"


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "one name again and again": (COMPLETIONS, lambda: repeated(b"", b'"prompt":"x"', b"")),
    "one name in disguise": (
        COMPLETIONS,
        lambda: repeated(b'"prompt":"x",', b'"us\\u0065r":"x"', b""),
    ),
    "ids": (COMPLETIONS, lambda: repeated(b'"prompt":[', b"1", b"]")),
    "prompts": (COMPLETIONS, lambda: repeated(b'"prompt":[', b'"x"', b"]")),
    "lists of ids": (COMPLETIONS, lambda: repeated(b'"prompt":[', b"[1]", b"]")),
    "biases": (COMPLETIONS, lambda: numbered(b'"prompt":"x","logit_bias":', b"", b"1")),
    "stop strings": (COMPLETIONS, lambda: repeated(b'"prompt":"x","stop":[', b'"x"', b"]")),
    "a schema": (
        COMPLETIONS,
        lambda: repeated(b'"prompt":"x","structured_outputs":{"json":{"enum":[', b'"a"', b"]}}"),
    ),
    "a prompt": (COMPLETIONS, lambda: text(b'"prompt":', b"")),
    "a prompt to cut": (COMPLETIONS, lambda: text(b'"truncate_prompt_tokens":5,"prompt":', b"")),
    "a regex": (COMPLETIONS, lambda: text(b'"prompt":"x","structured_outputs":{"regex":', b"}")),
    "metadata": (CHAT, lambda: numbered(MESSAGES + b',"metadata":', b"", b'"1"')),
    "messages": (CHAT, lambda: repeated(b'"messages":[', b'{"role":"user","content":"x"}', b"]")),
    "parts": (
        CHAT,
        lambda: repeated(
            b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"x"}', b"]}]"
        ),
    ),
    "a message": (CHAT, lambda: text(b'"messages":[{"role":"user","content":', b"}]")),
    "tools": (
        CHAT,
        lambda: repeated(
            MESSAGES + b',"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]"
        ),
    ),
    "template arguments": (
        CHAT,
        lambda: repeated(MESSAGES + b',"chat_template_kwargs":{"a":[', b"1", b"]}"),
    ),
    "blocks": (
        AGENT,
        lambda: repeated(
            b'"messages":[{"role":"user","content":[', b'{"type":"text","text":"x"}', b"]}]"
        ),
    ),
    "tools of other types": (
        AGENT,
        lambda: repeated(MESSAGES + b',"tools":[', b'{"type":"bash"}', b"]"),
    ),
    "instructions": (AGENT, lambda: text(MESSAGES + b',"system":', b"")),
    "items": (RESPONSES, lambda: repeated(b'"input":[', b'{"role":"user","content":"x"}', b"]")),
    "items of other types": (
        RESPONSES,
        lambda: repeated(b'"input":[', b'{"type":"web_search_call"}', b"]"),
    ),
    "references": (RESPONSES, lambda: repeated(b'"input":[', b'{"id":"msg_1"}', b"]")),
    "text parts": (
        RESPONSES,
        lambda: repeated(
            b'"input":[{"role":"user","content":[', b'{"type":"input_text","text":"x"}', b"]}]"
        ),
    ),
    "tools of servers": (
        RESPONSES,
        lambda: repeated(b'"input":"x","tools":[', b'{"type":"web_search"}', b"]"),
    ),
    "functions of a namespace": (
        RESPONSES,
        lambda: repeated(
            b'"input":"x","tools":[{"type":"namespace","name":"n","tools":[',
            b'{"type":"function","name":"f"}',
            b"]}]",
        ),
    ),
    "metadata of a response": (
        RESPONSES,
        lambda: numbered(b'"input":"x","metadata":', b"", b'"1"'),
    ),
    "instructions of a response": (RESPONSES, lambda: text(b'"input":"x","instructions":', b"")),
    "an input": (RESPONSES, lambda: text(b'"input":', b"")),
    "an input to shorten": (RESPONSES, lambda: text(b'"truncation":"auto","input":', b"")),
    "a text to tokenize": ("/tokenize", lambda: text(b'"prompt":', b"")),
    "ids to detokenize": ("/detokenize", lambda: repeated(b'"tokens":[', b"1", b"]")),
}


@pytest.mark.parametrize("name", BODIES)
def test_heavy_body(server: Server, watch: Watch, name: str) -> None:
    path, make = BODIES[name]
    body = make()
    assert 30 * MIB <= len(body) < 32 * MIB or name in (
        "biases",
        "metadata",
        "metadata of a response",
    )
    before = psutil.Process(server.process.pid).memory_info().rss
    response = post_raw(server, body, path)
    check_error(response)
    assert len(response.content) < 4096
    assert psutil.Process(server.process.pid).memory_info().rss - before < 300 * MIB
