"""Fields without effect of the objects in bodies, as `unused.py` has them for whole bodies."""

from collections.abc import Mapping

from orca_jax.serve.openai.schema.unused import (
    COMMON,
    OF_CLIENT,
    UnusedField,
    UnusedFields,
    ignored,
)

_MESSAGE: UnusedFields = {
    **dict.fromkeys(
        ("id", "type", "object", "status", "created", "created_at", "timestamp"), ignored(OF_CLIENT)
    ),
    **dict.fromkeys(
        ("metadata", "response_metadata", "usage_metadata", "usage"), ignored(OF_CLIENT)
    ),
    **dict.fromkeys(
        ("provider_specific_fields", "additional_kwargs", "providerOptions"), ignored(OF_CLIENT)
    ),
}
_CONTENT_IN_CONTENT = "put everything that the model shall read into content"
_ASSISTANT: UnusedFields = {
    **_MESSAGE,
    "refusal": ignored("templates have no place for it"),
    "annotations": ignored("templates have no place for them", []),
    "citations": ignored("templates have no place for them", []),
    "parsed": ignored("content has the same as text"),
    "finish_reason": ignored(OF_CLIENT),
    "reasoning_details": ignored("use reasoning, which is passed on to the chat template"),
    "thinking_blocks": ignored("use reasoning, which is passed on to the chat template"),
    "executed_tools": ignored("send the results of tools as messages of their own"),
    "images": UnusedField(_CONTENT_IN_CONTENT, ([],)),
    "audio": UnusedField(_CONTENT_IN_CONTENT),
    "function_call": UnusedField("use tool_calls"),
    "prefix": UnusedField("use continue_final_message", (False,)),
    "partial": UnusedField("use continue_final_message", (False,)),
}
_PLAIN: UnusedFields = dict.fromkeys(
    ("id", "index", "metadata", "provider_specific_fields", "providerOptions"), ignored(OF_CLIENT)
)
_EXTRA: UnusedFields = {**_PLAIN, "cache_control": COMMON["cache_control"]}
_STRICT: UnusedFields = {"strict": ignored("it belongs beside the schema")}

_BLOCK: UnusedFields = {
    **_PLAIN,
    **dict.fromkeys(("caller", "toolset_name"), ignored("all calls are made by the client")),
    "citations": ignored("templates have no place for them", []),
}
_ITEM: UnusedFields = {
    "status": ignored(OF_CLIENT, "completed"),
    **dict.fromkeys(
        ("created_by", "agent", "metadata", "provider_specific_fields"), ignored(OF_CLIENT)
    ),
    **dict.fromkeys(("caller", "async", "execution"), ignored("all calls are made by the client")),
}
_OF_PART: UnusedFields = {
    **_EXTRA,
    "prompt_cache_breakpoint": ignored("prefixes are cached without marks"),
}
_FUNCTION: UnusedFields = {
    **_EXTRA,
    "output_schema": ignored("results are text for the model"),
    "defer_loading": ignored("the model sees all tools", False),
    "allowed_callers": ignored("all calls are made by the client"),
    "async": ignored("all calls are made by the client", False),
}

# Fields of nested objects, by the name of the object's class.
NESTED: Mapping[str, UnusedFields] = {
    "SystemMessage": _MESSAGE,
    "DeveloperMessage": _MESSAGE,
    "UserMessage": _MESSAGE,
    "AssistantMessage": _ASSISTANT,
    "ToolMessage": {
        **_MESSAGE,
        "artifact": ignored("the model reads content"),
        "is_error": ignored("the model reads content", False),
    },
    "TextPart": {
        **_PLAIN,
        "annotations": ignored(OF_CLIENT, []),
        "citations": ignored(OF_CLIENT, []),
    },
    "CalledTool": {
        **{name: field for name, field in _EXTRA.items() if name != "id"},
        **dict.fromkeys(("status", "extra_content"), ignored(OF_CLIENT)),
    },
    "CalledFunction": {
        "parsed_arguments": ignored("arguments has the same as text"),
        "provider_specific_fields": ignored(OF_CLIENT),
    },
    "Tool": {**_PLAIN, **_STRICT},
    "FunctionDefinition": _EXTRA,
    "TextFormat": _STRICT,
    "JsonObjectFormat": _STRICT,
    "JsonSchemaFormat": _STRICT,
    "StreamOptions": {},
    "TurnMessage": {
        **_MESSAGE,
        "cache_control": COMMON["cache_control"],
        **dict.fromkeys(
            ("model", "stop_reason", "stop_sequence", "stop_details", "container"),
            ignored(OF_CLIENT),
        ),
        "output_config": UnusedField("settings are those of the whole call", ({},)),
    },
    "TextBlock": _BLOCK,
    "DocumentBlock": _BLOCK,
    "SearchResultBlock": _BLOCK,
    "ToolUseBlock": {name: field for name, field in _BLOCK.items() if name != "id"},
    "ToolResultBlock": {**_BLOCK, "is_error": ignored("the model reads content", False)},
    "ThinkingBlock": {**_BLOCK, "cache_control": COMMON["cache_control"]},
    "RedactedBlock": {**_BLOCK, "cache_control": COMMON["cache_control"]},
    "CustomTool": {
        **_PLAIN,
        "input_examples": ignored("templates have no place for them", []),
        "eager_input_streaming": ignored("inputs of calls are always streamed", True),
        "defer_loading": ignored("the model sees all tools", False),
        "allowed_callers": ignored("all calls are made by the client", ["direct"]),
    },
    "ThinkingConfig": {
        "budget_tokens": ignored("max_tokens limits reasoning and answer together"),
        "display": ignored("reasoning is returned as it is", "summarized"),
        "block_binding": ignored("signatures are not checked"),
    },
    "OutputConfig": {"task_budget": ignored("max_tokens limits each answer")},
    "OutputSchema": {"strict": ignored("keywords that cannot be enforced are left out and named")},
    "InputText": _EXTRA,
    "OutputText": {
        **_OF_PART,
        "annotations": ignored("templates have no place for them", []),
        "logprobs": ignored("templates have no place for them", []),
        "parsed": ignored("text has the same"),
    },
    "RefusalPart": _OF_PART,
    "InputMessage": {
        **_ITEM,
        "phase": ignored("templates have no place for it"),
        "name": ignored(OF_CLIENT),
    },
    "InputCall": {**_ITEM, "parsed_arguments": ignored("arguments has the same as text")},
    "CallOutput": {**_ITEM, **dict.fromkeys(("name", "namespace"), ignored("the call has them"))},
    **dict.fromkeys(
        ("CustomCall", "CustomOutput", "LocalShellCall", "LocalShellOutput", "PatchCall"), _ITEM
    ),
    "ShellCall": {**_ITEM, "environment": ignored(OF_CLIENT)},
    "ShellOutput": {**_ITEM, "max_output_length": ignored("the whole output is passed on")},
    "PatchOutput": {name: field for name, field in _ITEM.items() if name != "status"},
    "ProgramCall": {**_ITEM, "fingerprint": ignored(OF_CLIENT)},
    "ProgramOutput": _ITEM,
    "McpCall": {**_ITEM, "approval_request_id": ignored(OF_CLIENT)},
    "CodeCall": {**_ITEM, "container_id": ignored(OF_CLIENT)},
    "FileSearchCall": _ITEM,
    "InputReasoning": {**_ITEM, "encrypted_content": ignored("reasoning is sent and read as text")},
    "FlatFunction": _FUNCTION,
    "Namespace": _EXTRA,
    "FlatNamedTool": _EXTRA,
    "TextSettings": {"verbosity": ignored("the length of answers cannot be controlled", "medium")},
    "ReasoningSettings": dict.fromkeys(("context", "mode"), ignored("the chat template decides")),
    "ResponseStreamOptions": {
        "include_obfuscation": ignored("events are not padded to hide their length", False)
    },
}
