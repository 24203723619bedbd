"""Every field of OpenAI's client and of its objects is honoured, ignored or refused in the tables."""

import typing
from typing import Any

import pytest
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseCodeInterpreterToolCallParam,
    ResponseCustomToolCallOutputParam,
    ResponseCustomToolCallParam,
    ResponseFileSearchToolCallParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
    response_create_params,
    response_input_item_param,
)
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.namespace_tool_param import NamespaceToolParam
from openai.types.responses.response_input_text_param import ResponseInputTextParam
from openai.types.shared_params import Reasoning

from orca_jax.serve.openai.schema import hosted, responses_parser
from orca_jax.serve.openai.schema.input_items import (
    CallOutput,
    InputCall,
    InputMessage,
    InputReasoning,
    InputText,
    ItemReference,
    OutputText,
)
from orca_jax.serve.openai.schema.nested import NESTED
from orca_jax.serve.openai.schema.responses import (
    FlatFunction,
    Namespace,
    ReasoningSettings,
    ResponseStreamOptions,
    TextSettings,
)
from tests.openai.responses.played import respond

OBJECTS: list[tuple[Any, Any]] = [
    (EasyInputMessageParam, InputMessage),
    (response_input_item_param.Message, InputMessage),
    (ResponseOutputMessageParam, InputMessage),
    (ResponseFunctionToolCallParam, InputCall),
    (response_input_item_param.FunctionCallOutput, CallOutput),
    (ResponseReasoningItemParam, InputReasoning),
    (response_input_item_param.ItemReference, ItemReference),
    (ResponseCustomToolCallParam, hosted.CustomCall),
    (ResponseCustomToolCallOutputParam, hosted.CustomOutput),
    (response_input_item_param.LocalShellCall, hosted.LocalShellCall),
    (response_input_item_param.LocalShellCallOutput, hosted.LocalShellOutput),
    (response_input_item_param.ShellCall, hosted.ShellCall),
    (response_input_item_param.ShellCallOutput, hosted.ShellOutput),
    (response_input_item_param.ApplyPatchCall, hosted.PatchCall),
    (response_input_item_param.ApplyPatchCallOutput, hosted.PatchOutput),
    (response_input_item_param.Program, hosted.ProgramCall),
    (response_input_item_param.ProgramOutput, hosted.ProgramOutput),
    (response_input_item_param.McpCall, hosted.McpCall),
    (ResponseCodeInterpreterToolCallParam, hosted.CodeCall),
    (ResponseFileSearchToolCallParam, hosted.FileSearchCall),
    (ResponseInputTextParam, InputText),
    (ResponseOutputTextParam, OutputText),
    (FunctionToolParam, FlatFunction),
    (NamespaceToolParam, Namespace),
    (ResponseTextConfigParam, TextSettings),
    (Reasoning, ReasoningSettings),
    (response_create_params.StreamOptions, ResponseStreamOptions),
]


def fields(kind: Any) -> set[str]:
    return set(typing.get_type_hints(kind))


def test_every_field_of_the_client_is_in_the_tables() -> None:
    known = {*responses_parser.kind.__struct_fields__, *responses_parser.unused}
    asked = fields(response_create_params.ResponseCreateParamsBase) | {"stream"}
    assert len(asked) > 30 and not asked - known, f"say what becomes of {sorted(asked - known)}"
    assert not fields(InputTokenCountParams) - known
    assert not set(responses_parser.kind.__struct_fields__) & set(responses_parser.unused), (
        "one or the other"
    )


@pytest.mark.parametrize(
    ("theirs", "ours"), OBJECTS, ids=[theirs.__name__ for theirs, _ in OBJECTS]
)
def test_every_field_of_its_objects_is_in_the_tables(theirs: Any, ours: Any) -> None:
    known = {*ours.__struct_fields__, *NESTED.get(ours.__name__, {}), "type"}
    assert not fields(theirs) - known, f"say what becomes of {sorted(fields(theirs) - known)}"


IGNORED: dict[str, Any] = {
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "flex",
    "client_metadata": {"a": "b"},
    "max_tool_calls": 2,
    "include": ["reasoning.encrypted_content"],
    "background_options": {"retention": 60},
    "text": {"verbosity": "low"},
    "reasoning": {"mode": "standard"},
}


@pytest.mark.conforms(
    "responses.without effect", "responses.stream_options", "responses.request_id"
)
@pytest.mark.parametrize("name", IGNORED)
def test_what_cannot_change_an_answer_is_ignored_and_named(name: str) -> None:
    answer, _ = respond("x", **{name: IGNORED[name]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-orca-ignored-fields"].partition(".")[0] == name
    quiet, _ = respond(
        "x",
        stream_options={"include_obfuscation": False},
        stream=True,
        include=[],
        request_id="mine",
    )
    assert respond("x", background_options={})[0].status_code == 200
    assert "x-orca-ignored-fields" not in quiet.headers and "mine" not in quiet.text


@pytest.mark.conforms("responses.chat_template_kwargs", "responses.reasoning")
def test_the_effort_is_a_variable_of_the_template(tmp_path: Any) -> None:
    from orca_jax.server_config import ServerConfig
    from orca_jax.values.config import EngineConfig
    from tests.openai.responses.played import prompt_of

    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages[0].content }}|{{ reasoning_effort }}|{{ extra }}", encoding="utf-8"
    )
    config = ServerConfig(EngineConfig(model="m"), chat_template=str(template))
    _, link = respond(
        "x", config, reasoning={"effort": "low"}, chat_template_kwargs={"extra": "more"}
    )
    assert prompt_of(link) == "x|low|more"
    template.write_text("{{ messages[0].content }}|{{ enable_thinking }}", encoding="utf-8")
    for effort, shown in (("none", "False"), ("low", "")):
        answer, link = respond("x", config, reasoning={"effort": effort})
        assert prompt_of(link) == f"x|{shown}"
        assert answer.headers.get("x-orca-ignored-fields") == (
            None if shown else "reasoning.effort"
        )
    unread, _ = respond("x", reasoning={"effort": "low"})
    assert unread.headers["x-orca-ignored-fields"] == "reasoning.effort"
