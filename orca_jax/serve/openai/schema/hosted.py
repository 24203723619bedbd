"""The input items of `POST /v1/responses` that belong to tools which OpenAI defines or runs.

Items with a text become calls of functions and their results. The others are left out by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.input_items import CallOutput, InputCall, InputText, ItemId
from orca_jax.serve.openai.schema.limits import MAX_PARTS
from orca_jax.serve.openai.schema.structured import JsonObject, TypedObject

LEFT_OUT = frozenset(
    {
        "additional_tools",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items without a text for the model."""

ResultParts = Annotated[list[InputText], Meta(max_length=MAX_PARTS)]
Objects = Annotated[list[JsonObject], Meta(max_length=MAX_PARTS)]


class CustomCall(TypedObject, frozen=True, tag="custom_tool_call"):
    """An earlier call of a tool whose input is a text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: ItemId | None = None


class CustomOutput(TypedObject, frozen=True, tag="custom_tool_call_output"):
    """The result of a tool whose input is a text."""

    call_id: str
    output: str | ResultParts
    id: ItemId | None = None


class LocalShellCall(TypedObject, frozen=True, tag="local_shell_call"):
    """An earlier command for a shell of the client."""

    call_id: str
    action: JsonObject
    id: ItemId | None = None


class LocalShellOutput(TypedObject, frozen=True, tag="local_shell_call_output"):
    """The result of a command for a shell of the client. Without `call_id` its id is the id of the call."""

    output: str
    call_id: str | None = None
    id: ItemId | None = None


class ShellCall(TypedObject, frozen=True, tag="shell_call"):
    """Earlier commands for a shell."""

    call_id: str
    action: JsonObject
    id: ItemId | None = None


class ShellOutput(TypedObject, frozen=True, tag="shell_call_output"):
    """The results of commands for a shell. The model reads them as JSON."""

    call_id: str
    output: Objects
    id: ItemId | None = None


class PatchCall(TypedObject, frozen=True, tag="apply_patch_call"):
    """An earlier change of a file."""

    call_id: str
    operation: JsonObject
    id: ItemId | None = None


class PatchOutput(TypedObject, frozen=True, tag="apply_patch_call_output"):
    """The result of a change of a file."""

    call_id: str
    status: str | None = None
    output: str | None = None
    id: ItemId | None = None


class ProgramCall(TypedObject, frozen=True, tag="program"):
    """An earlier program that calls tools."""

    call_id: str
    code: str
    id: ItemId | None = None


class ProgramOutput(TypedObject, frozen=True, tag="program_output"):
    """The result of a program that calls tools."""

    call_id: str
    result: str
    id: ItemId | None = None


class McpCall(TypedObject, frozen=True, tag="mcp_call"):
    """An earlier call of a tool of an MCP server, with its result or error."""

    name: str
    arguments: str
    server_label: str | None = None
    output: str | None = None
    error: Any = None
    id: ItemId | None = None


class CodeLogs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text that a program wrote."""

    type: Literal["logs"]
    logs: str


class CodeCall(TypedObject, frozen=True, tag="code_interpreter_call"):
    """An earlier program of the model, with the text that it wrote."""

    code: str | None = None
    outputs: Annotated[list[CodeLogs], Meta(max_length=MAX_PARTS)] | None = None
    id: ItemId | None = None


class FileSearchCall(TypedObject, frozen=True, tag="file_search_call"):
    """An earlier search in files, with what it found. The model reads it as JSON."""

    queries: Annotated[list[str], Meta(max_length=MAX_PARTS)]
    results: Objects | None = None
    id: ItemId | None = None


_Called = CustomCall | LocalShellCall | ShellCall | PatchCall | ProgramCall
_Returned = CustomOutput | LocalShellOutput | ShellOutput | PatchOutput | ProgramOutput
HostedItem = _Called | _Returned | McpCall | CodeCall | FileSearchCall
RESULT_ITEMS = (CallOutput, CustomOutput, LocalShellOutput, ShellOutput, PatchOutput, ProgramOutput)
"""Items with the result of an earlier call."""
RESULTS = ("custom_tool_call_output", "function_call_output")
"""Types of results whose parts may be images and files."""


def as_functions(item: HostedItem) -> list[InputCall | CallOutput]:
    """The calls of functions and their results that the model sees in the place of an item."""
    if isinstance(item, _Called):
        return [_call_of(item)]
    if isinstance(item, _Returned):
        return [_result_of(item)]
    return _call_with_result(item)


def _call_of(item: _Called) -> InputCall:
    match item:
        case CustomCall(call_id, name, text, namespace):
            return InputCall(call_id, name, _json({"input": text}), namespace)
        case LocalShellCall(call_id, action):
            return InputCall(call_id, "local_shell", _json(action))
        case ShellCall(call_id, action):
            return InputCall(call_id, "shell", _json(action))
        case PatchCall(call_id, operation):
            return InputCall(call_id, "apply_patch", _json(operation))
        case ProgramCall(call_id, code):
            return InputCall(call_id, "program", _json({"code": code}))


def _result_of(item: _Returned) -> CallOutput:
    match item:
        case CustomOutput(call_id, output):
            return CallOutput(call_id, output)
        case LocalShellOutput(output, call_id, name):
            return CallOutput(call_id or name or "", output)
        case ShellOutput(call_id, outputs):
            return CallOutput(call_id, _json(outputs))
        case PatchOutput(call_id, status, text):
            return CallOutput(call_id, text or status or "")
        case ProgramOutput(call_id, result):
            return CallOutput(call_id, result)


def _call_with_result(
    item: McpCall | CodeCall | FileSearchCall,
) -> list[InputCall | CallOutput]:
    match item:
        case McpCall(name, arguments, server, output, error):
            text = output if output is not None or error is None else _json({"error": error})
            return _with_result(item.id, InputCall("", name, arguments, server), text)
        case CodeCall(code, logs):
            text = "\n".join(one.logs for one in logs or ())
            return _with_result(
                item.id, InputCall("", "code_interpreter", _json({"code": code})), text
            )
        case FileSearchCall(queries, results):
            text = None if results is None else _json(results)
            return _with_result(
                item.id, InputCall("", "file_search", _json({"queries": queries})), text
            )


def _with_result(
    name: str | None, call: InputCall, result: str | None
) -> list[InputCall | CallOutput]:
    """A call and its result, which are one item. `name` is its id."""
    call_id = name or ""
    return [msgspec.structs.replace(call, call_id=call_id), CallOutput(call_id, result or "")]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
