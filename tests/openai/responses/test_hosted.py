"""Input items of tools that OpenAI defines: texts reach the prompt, the others are named, unknown ones are refused."""

import typing
from typing import Any

import pytest
from openai.types.responses import ResponseInputItemParam

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.responses.api import messages_of
from orca_jax.serve.openai.schema import responses_parser
from orca_jax.serve.openai.schema.hosted import LEFT_OUT
from tests.openai.responses.played import respond
from tests.openai.responses.test_conversion import messages, own_items, parsed, refused

TEXT = {"type": "input_text", "text": "seen"}
IMAGE = {"type": "input_image", "image_url": "x"}
SHELL_PART = {"stdout": "seen", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "custom_tool_call": ({"call_id": "c", "name": "patch", "input": "seen"}, "patch"),
    "local_shell_call": (
        {"call_id": "c", "action": {"type": "exec", "command": ["seen"]}},
        "local_shell",
    ),
    "shell_call": ({"call_id": "c", "action": {"commands": ["seen"]}}, "shell"),
    "apply_patch_call": (
        {"call_id": "c", "operation": {"type": "delete_file", "path": "seen"}},
        "apply_patch",
    ),
    "program": ({"id": "p", "call_id": "c", "code": "seen", "fingerprint": "f"}, "program"),
}
RESULTS: dict[str, dict[str, Any]] = {
    "custom_tool_call_output": {"call_id": "c", "output": "seen"},
    "local_shell_call_output": {"id": "c", "output": "seen"},
    "shell_call_output": {"call_id": "c", "output": [SHELL_PART]},
    "apply_patch_call_output": {"call_id": "c", "output": "seen", "status": "failed"},
    "program_output": {"id": "p", "call_id": "c", "result": "seen", "status": "completed"},
}
BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "mcp_call": (
        {"id": "m", "server_label": "s", "name": "f", "arguments": "{}", "output": "seen"},
        "s__f",
    ),
    "code_interpreter_call": (
        {
            "id": "c",
            "container_id": "x",
            "code": "1",
            "outputs": [{"type": "logs", "logs": "seen"}],
        },
        "code_interpreter",
    ),
    "file_search_call": (
        {
            "id": "f",
            "queries": ["q"],
            "results": [{"filename": "a.txt", "text": "seen"}],
            "status": "completed",
        },
        "file_search",
    ),
}


def test_each_item_of_the_client_is_in_one_of_the_tables() -> None:
    kinds: set[str] = set()
    for one in typing.get_args(ResponseInputItemParam):
        hint = typing.get_type_hints(one)["type"]
        kinds |= {
            kind
            for part in (hint, *typing.get_args(hint))
            for kind in typing.get_args(part) or [part]
        } - {None}
    kinds = {kind for kind in kinds if isinstance(kind, str)}
    assert len(kinds) > 25, "the types were found"
    shown = {"message", "function_call", "function_call_output", "reasoning", "item_reference"}
    ours = {*CALLS, *RESULTS, *BOTH}
    assert kinds <= shown | ours | LEFT_OUT
    assert not ours & LEFT_OUT


@pytest.mark.conforms("responses.input")
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_of_another_tool_is_one_of_a_function(kind: str) -> None:
    fields, name = CALLS[kind]
    (message,) = messages({"type": kind, **fields})
    (call,) = message["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c", name)
    assert "seen" in str(call["function"]["arguments"])


@pytest.mark.conforms("responses.input")
@pytest.mark.parametrize("kind", RESULTS)
def test_the_text_of_a_result_reaches_the_prompt(kind: str) -> None:
    (message,) = messages({"type": kind, **RESULTS[kind]})
    assert (message["role"], message["tool_call_id"]) == ("tool", "c")
    assert "seen" in message["content"]


@pytest.mark.conforms("responses.input")
@pytest.mark.parametrize("kind", BOTH)
def test_a_call_with_its_result_becomes_two_messages(kind: str) -> None:
    fields, name = BOTH[kind]
    call, result = messages({"type": kind, **fields})
    assert call["tool_calls"][0]["function"]["name"] == name
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert "seen" in result["content"]


def test_an_error_of_a_call_is_its_result() -> None:
    failed = {
        "type": "mcp_call",
        "id": "m",
        "server_label": "s",
        "name": "f",
        "arguments": "{}",
        "error": "gone",
    }
    assert "gone" in messages(failed)[1]["content"]


@pytest.mark.conforms("responses.input")
def test_what_has_no_text_is_left_out_and_named() -> None:
    items = [{"type": kind, "id": "x"} for kind in sorted(LEFT_OUT)]
    call, ignored = parsed(input=[*items, {"role": "user", "content": "x"}])
    assert len(own_items(call)) == 1
    assert ignored.unknown == tuple(f"input.{kind}" for kind in sorted(LEFT_OUT))


@pytest.mark.conforms("responses.input")
@pytest.mark.parametrize("kind", ["custom_tool_call_outputs", "video", ""])
def test_an_unknown_type_is_refused_by_name(kind: str) -> None:
    error = refused(input=[{"role": "user", "content": "x"}, {"type": kind, "output": "seen"}])
    assert (error.status, error.param) == (400, "input[1].type")
    assert repr(kind) in error.message
    answer, link = respond("x", input=[{"type": kind, "output": "seen"}])
    assert answer.status_code == 400 and not link.submitted


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": 3}, "input[0].output"),
        ({"type": "mcp_call", "name": "f", "arguments": {}}, "input[0].arguments"),
        ({"type": "shell_call", "call_id": "c", "action": "ls"}, "input[0].action"),
        ({"type": "code_interpreter_call", "outputs": [{"logs": "x"}]}, "input[0].outputs[0].type"),
        ({"type": "shell_call", "call_id": "c", "action": {}, "strange": 1}, "input[0].strange"),
    ],
)
def test_a_wrong_field_of_such_an_item_is_refused_by_name(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(input=[item])
    assert caught.value.param == param


@pytest.mark.conforms("responses.input")
@pytest.mark.parametrize(
    "result",
    [
        {"type": "function_call_output", "call_id": "c", "output": [TEXT, IMAGE]},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [TEXT, IMAGE]},
    ],
)
def test_an_image_in_a_result_is_a_placeholder_and_named(result: dict[str, Any]) -> None:
    call, ignored = parsed(input=[result])
    (message,) = messages(result)
    assert message["content"] == "seen\n[input_image left out: the model reads text only]"
    assert ignored.unknown == ("input.output.input_image",) and own_items(call)


def test_an_image_that_a_program_has_drawn_is_a_placeholder_and_named() -> None:
    fields, _ = BOTH["code_interpreter_call"]
    outputs = [*fields["outputs"], {"type": "image", "url": "x"}]
    item = {**fields, "type": "code_interpreter_call", "outputs": outputs}
    _, ignored = parsed(input=[item])
    assert ignored.unknown == ("input.outputs.image",)
    assert messages(item)[-1]["content"] == "seen\n[image left out: the model reads text only]"


@pytest.mark.conforms("responses.input")
def test_a_text_file_in_a_result_is_its_text() -> None:
    data = "data:text/plain;base64,c2Vlbg=="
    part = {"type": "input_file", "filename": "a.txt", "file_data": data}
    (message,) = messages({"type": "function_call_output", "call_id": "c", "output": [part]})
    assert message["content"] == "seen"
    broken = {**part, "file_data": "data:text/plain;base64,/w=="}
    (message,) = messages({"type": "function_call_output", "call_id": "c", "output": [broken]})
    assert "left out" in message["content"], "its bytes are not UTF-8"


def test_a_deep_action_is_shown_or_refused() -> None:
    """Whatever depth the reader of bodies takes, the conversion takes too."""
    for depth in (100, 900, 100_000):
        action = '{"a":' * depth + "1" + "}" * depth
        body = '{"model":"m","input":[{"type":"shell_call","call_id":"c","action":' + action + "}]}"
        try:
            call, _ = responses_parser.parse(body.encode())
        except ApiError as error:
            assert error.status == 400
            continue
        assert messages_of(None, own_items(call))
