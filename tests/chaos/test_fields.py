"""Every numeric field with every invalid value, and ids outside the vocabulary in every field of ids."""

import json
from typing import Any

import pytest

from orca_jax.serve.openai.schema import messages_parser, responses_parser
from tests.chaos.world import Watch, check_error, post_raw
from tests.serve.running import EOS, MODEL, VOCAB_SIZE, Server

BAD_VALUES = (
    "NaN",
    "Infinity",
    "-Infinity",
    "-1",
    "9223372036854775808",
    "1e308",
    '""',
    "[]",
    "true",
    "{}",
)
NUMBERS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "prompt_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "truncate_prompt_tokens", "priority",
)  # fmt: skip
ONLY_COMPLETIONS = ("best_of",)
ONLY_CHAT = ("max_completion_tokens", "top_logprobs")
MINUS_ONE_IS_FINE = {
    "seed": "64 bits, signed",
    "top_k": "vLLM's name for all",
    "max_tokens": "as many as fit",
    "max_completion_tokens": "as many as fit",
    "max_output_tokens": "as many as fit",
    "presence_penalty": "from -2 to 2",
    "frequency_penalty": "from -2 to 2",
    "truncate_prompt_tokens": "vLLM's name for what fits",
}
TARGETS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
    },
}
OF_MESSAGES = set(messages_parser.kind.__struct_fields__)
OF_RESPONSES = set(responses_parser.kind.__struct_fields__)
CASES = [
    *(
        (path, name)
        for path in TARGETS
        for name in NUMBERS
        if (path, name) != ("/v1/chat/completions", "logprobs")
    ),
    *(("/v1/messages", name) for name in NUMBERS if name in OF_MESSAGES),
    *(
        ("/v1/responses", name)
        for name in (*NUMBERS, "top_logprobs", "max_output_tokens")
        if name in OF_RESPONSES
    ),
    *(("/v1/completions", name) for name in ONLY_COMPLETIONS),
    *(("/v1/chat/completions", name) for name in ONLY_CHAT),
]


def body_with(path: str, name: str, value: str) -> bytes:
    """A valid body, except for one field with this text as its value."""
    target = TARGETS.get(path, TARGETS["/v1/chat/completions"])
    if path == "/v1/responses":
        target = {"model": MODEL, "input": "x", "max_output_tokens": 4}
    fields = {key: json.dumps(field) for key, field in target.items()}
    fields[name] = value
    if name == "max_completion_tokens":
        del fields["max_tokens"]
    if name == "top_logprobs" and path == "/v1/responses":
        fields["include"] = '["message.output_text.logprobs"]'
    elif name == "top_logprobs":
        fields["logprobs"] = "true"
    return ("{" + ", ".join(f'"{key}": {field}' for key, field in fields.items()) + "}").encode()


@pytest.mark.parametrize(("path", "name"), CASES)
def test_bad_numbers(server: Server, watch: Watch, path: str, name: str) -> None:
    for value in BAD_VALUES:
        response = post_raw(server, body_with(path, name, value), path)
        if value == "-1" and name in MINUS_ONE_IS_FINE:
            assert response.status_code == 200, response.text
            continue
        error = check_error(response)
        is_no_json = value in ("NaN", "Infinity", "-Infinity")
        assert is_no_json or name in (error["param"] or ""), f"{value} for {name}: {error}"
    assert post_raw(server, body_with(path, name, "null"), path).status_code == 200, (
        "null is not given"
    )


@pytest.mark.parametrize("path", TARGETS)
def test_bad_numbers_within_fields(server: Server, watch: Watch, path: str) -> None:
    for value in BAD_VALUES:
        for name, field in (
            ("logit_bias", f'{{"1": {value}}}'),
            ("stop_token_ids", f"[{value}]"),
            ("allowed_token_ids", f"[{value}]"),
            ("stream_options", f'{{"include_usage": {value}}}'),
        ):
            if (name, value) in {("logit_bias", "-1"), ("stream_options", "true")}:
                continue
            error = check_error(post_raw(server, body_with(path, name, field), path))
            assert value in ("NaN", "Infinity", "-Infinity") or (error["param"] or "").startswith(
                name
            ), (value, error)


def test_null_where_something_is_needed(server: Server, watch: Watch) -> None:
    for path, name in (
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "prompt"),
    ):
        body = {"model": MODEL, name: None}
        check_error(post_raw(server, json.dumps(body).encode(), path))


@pytest.mark.parametrize(
    "wrong", [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63)]
)
def test_ids_out_of_the_vocabulary(server: Server, watch: Watch, wrong: int) -> None:
    places: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": [wrong]}),
        ("prompt", {"prompt": [1, 2, wrong]}),
        ("prompt", {"prompt": [[1], [wrong]]}),
        ("stop_token_ids", {"stop_token_ids": [EOS, wrong]}),
        ("allowed_token_ids", {"allowed_token_ids": [1, wrong]}),
        ("logit_bias", {"logit_bias": {str(wrong): 1.0}}),
    ]
    for param, fields in places:
        error = check_error(server.complete(**{"prompt": "x", **fields}), 400)
        assert (error["param"] or "").startswith(param), error
    check_error(server.http.post("/detokenize", json={"model": MODEL, "tokens": [1, wrong]}), 400)
