"""Fields without effect here: ignored ones, and others accepted only at values without a request.

A field that could change an answer is honoured or refused by name. A field that cannot change it here is ignored: it
must not break a client. The server names ignored fields in a header of the answer and counts them. `null` is accepted
for all fields, known or not, and means that the field is not given.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from orca_jax.openai.errors import ApiError


class UnusedField(NamedTuple):
    """A field without effect."""

    reason: str
    values: tuple[object, ...] = ()  # accepted values that request nothing
    is_ignored: bool = False  # any other value is ignored; otherwise it is refused

    def takes(self, value: object) -> bool:
        """True if a value requests nothing, so that it need not be reported."""
        return value is None or any(value == one and type(value) in _kinds(one) for one in self.values)

    def schema(self) -> dict[str, Any]:
        """The field as a JSON schema."""
        if self.is_ignored:
            return {"description": f"Ignored: {self.reason}."}
        return {"enum": [None, *self.values], "description": f"No other value is accepted: {self.reason}."}


def ignored(reason: str, *values: object) -> UnusedField:
    """A field without effect at any value; `values` need not be reported."""
    return UnusedField(reason, values, is_ignored=True)


type UnusedFields = Mapping[str, UnusedField]

_NO_RECORDS = "the server keeps no records of calls"
_NO_REASONING = "an answer has its reasoning apart if the tags around it are known"
_ONE_MODEL = "the server has one model"
_ONE_CACHE = "all requests share one prefix cache"
_NO_BEAMS = "beam search is not supported"
_NO_SAMPLER = "this sampler is not supported"
_NO_SEARCH = "web search is not supported"
_STRUCTURED = "use structured_outputs or response_format"
OF_CLIENT = "client libraries add it"

# Fields of completions and chat completions.
COMMON: UnusedFields = {
    # OpenAI and Azure
    "metadata": ignored(_NO_RECORDS, {}),
    "store": ignored("answers are not stored", False),
    "service_tier": ignored("there is only one tier", "auto", "default"),
    "safety_identifier": ignored(_NO_RECORDS),
    "user_security_context": ignored(_NO_RECORDS),
    "prompt_cache_key": ignored(_ONE_CACHE),
    "prompt_cache_options": ignored(_ONE_CACHE, {}),
    "prompt_cache_retention": ignored("cached prefixes stay until their memory is needed", "in_memory", "in-memory"),
    "prediction": ignored("a predicted output could change only the speed"),
    "provider_specific_fields": ignored(OF_CLIENT, {}),
    "cache_control": ignored("prefixes are cached without marks"),
    # vLLM
    "use_beam_search": UnusedField(_NO_BEAMS, (False,)),
    "length_penalty": UnusedField(_NO_BEAMS, (1,)),
    "early_stopping": UnusedField(_NO_BEAMS, (False,)),
    "spaces_between_special_tokens": UnusedField("tokens are joined as the tokenizer defines", (True,)),
    "return_tokens_as_token_ids": UnusedField("use return_token_ids to get token ids", (False,)),
    "prompt_embeds": UnusedField("prompts are texts or token ids"),
    "logits_processors": UnusedField("code of a request is never run", ([],)),
    "guided_json": UnusedField(_STRUCTURED),
    "guided_regex": UnusedField(_STRUCTURED),
    "guided_choice": UnusedField(_STRUCTURED, ([],)),
    "guided_grammar": UnusedField(_STRUCTURED),
    "guided_decoding_backend": ignored("there is only one"),
    "guided_whitespace_pattern": UnusedField("JSON is generated without free blanks"),
    "kv_transfer_params": UnusedField("keys and values are not transferred between servers", ({},)),
    "repetition_detection": UnusedField("use repetition_penalty, frequency_penalty or presence_penalty", ({},)),
    # SGLang
    "rid": ignored("use request_id to name a request"),
    "regex": UnusedField(_STRUCTURED),
    "ebnf": UnusedField(_STRUCTURED),
    "stop_regex": UnusedField("use stop", ([],)),
    "no_stop_trim": UnusedField("use include_stop_str_in_output", (False,)),
    "lora_path": UnusedField("model is the name of the adapter"),
    "session_params": UnusedField("a call has no session: send the whole conversation", ({},)),
    "custom_logit_processor": UnusedField("code of a request is never run"),
    "custom_params": UnusedField("code of a request is never run", ({},)),
    "return_hidden_states": UnusedField("hidden states are not returned", (False,)),
    "return_routed_experts": UnusedField("experts are not returned", (False,)),
    "extra_key": UnusedField("use cache_salt to separate prefix caches"),
    "data_parallel_rank": ignored("the server has one engine"),
    # Mistral
    "random_seed": UnusedField("use seed"),
    # llama.cpp, Ollama and LM Studio
    "cache_prompt": ignored("--enable-prefix-caching decides", True),
    "id_slot": ignored("rows are chosen by the scheduler", -1),
    "keep_alive": ignored("the model stays loaded"),
    "ttl": ignored("the model stays loaded"),
    "draft_model": ignored("a draft could change only the speed"),
    "timings_per_token": ignored("times are in the metrics", False),
    "return_progress": ignored("a prompt has no progress events", False),
    "n_predict": UnusedField("use max_tokens"),
    "repeat_penalty": UnusedField("use repetition_penalty", (1,)),
    "grammar": UnusedField(_STRUCTURED),
    "json_schema": UnusedField(_STRUCTURED),
    "typical_p": UnusedField(_NO_SAMPLER, (1,)),
    "tfs_z": UnusedField(_NO_SAMPLER, (1,)),
    "mirostat": UnusedField(_NO_SAMPLER, (0,)),
    "dynatemp_range": UnusedField(_NO_SAMPLER, (0,)),
    "xtc_probability": UnusedField(_NO_SAMPLER, (0,)),
    "dry_multiplier": UnusedField(_NO_SAMPLER, (0,)),
    # OpenRouter
    "top_a": UnusedField(_NO_SAMPLER, (0,)),
    "provider": ignored(_ONE_MODEL),
    "models": ignored(_ONE_MODEL),
    "route": ignored(_ONE_MODEL),
    "transforms": ignored("prompts are never compressed; a prompt that is too long is refused", []),
    "usage": ignored("answers have a usage; streams have one with stream_options.include_usage"),
    "session_id": ignored(_NO_RECORDS),
    "trace": ignored(_NO_RECORDS),
    "debug": ignored("prompts are returned by return_token_ids", {}),
    "plugins": UnusedField("plugins are not supported", ([],)),
    # Anthropic, Fireworks
    "stop_sequences": UnusedField("use stop", ([],)),
    "context_length_exceeded_behavior": UnusedField("use truncate_prompt_tokens", ("error",)),
    "prompt_truncate_len": UnusedField("use truncate_prompt_tokens"),
    "perf_metrics_in_response": ignored("times are in the metrics", False),
}

COMPLETION: UnusedFields = {
    **COMMON,
    "suffix": UnusedField("filling in the middle of a text is not supported", ("",)),
}

CHAT: UnusedFields = {
    **COMMON,
    # OpenAI and Azure
    "modalities": UnusedField("the model generates text only", (["text"],)),
    "audio": UnusedField("the model generates text only"),
    "verbosity": ignored("the length of answers cannot be controlled", "medium"),
    "web_search_options": UnusedField(_NO_SEARCH),
    "functions": UnusedField("use tools", ([],)),
    "function_call": UnusedField("use tool_choice", ("none",)),
    "best_of": UnusedField("n candidates are generated for n choices", (1,)),
    "data_sources": UnusedField("put documents into messages", ([],)),
    # Anthropic through LiteLLM, OpenRouter, DeepSeek
    "reasoning": ignored("use reasoning_effort or chat_template_kwargs"),
    "thinking": ignored("use chat_template_kwargs"),
    "reasoning_details": ignored(_NO_REASONING),
    "include_reasoning": ignored(_NO_REASONING),
    "context_management": UnusedField("messages are never removed from a conversation", ({},)),
    "mcp_servers": UnusedField("the server calls no tools; call them in the client", ([],)),
    "container": UnusedField("the server calls no tools; call them in the client"),
    "system": UnusedField("put instructions into messages", ("",)),
    # Groq
    "reasoning_format": ignored(_NO_REASONING),
    "disable_tool_validation": ignored("only calls of known tools are returned", False),
    "citation_options": ignored("answers have no citations"),
    "search_settings": UnusedField(_NO_SEARCH, ({},)),
    "include_domains": UnusedField(_NO_SEARCH, ([],)),
    "exclude_domains": UnusedField(_NO_SEARCH, ([],)),
    "compound_custom": UnusedField("the server calls no tools; call them in the client", ({},)),
    # SGLang, Qwen, xAI
    "separate_reasoning": ignored(_NO_REASONING),
    "stream_reasoning": ignored(_NO_REASONING),
    "enable_search": UnusedField(_NO_SEARCH, (False,)),
    "search_options": UnusedField(_NO_SEARCH, ({},)),
    "search_parameters": UnusedField(_NO_SEARCH),
    "deferred": UnusedField("an answer is returned by its own call", (False,)),
    # Mistral
    "safe_prompt": UnusedField("put instructions into messages", (False,)),
    "prompt_mode": UnusedField("put instructions into messages"),
    # vLLM
    "documents": UnusedField("put documents into messages", ([],)),
    "chat_template": UnusedField("a template is a program; only the operator of the server may set one"),
    "mm_processor_kwargs": UnusedField("messages are text only", ({},)),
    "media_io_kwargs": UnusedField("messages are text only", ({},)),
    "image_config": UnusedField("the model generates text only", ({},)),
    "thinking_token_budget": UnusedField("use max_tokens"),
    "thinking_budget": UnusedField("use max_tokens"),
}

_OF_CALLS = ("metadata", "store", "service_tier", "safety_identifier", "provider_specific_fields", "keep_alive", "rid")
EMBEDDING: UnusedFields = {
    **{name: COMMON[name] for name in _OF_CALLS},
    # Azure, NVIDIA, Cohere, Voyage
    "input_type": UnusedField("put an instruction into the input"),
    "truncate": UnusedField("an input that is too long is refused", ("NONE",)),
    "truncation": UnusedField("an input that is too long is refused", (False,)),
    "output_dtype": UnusedField("vectors have float32 numbers", ("float",)),
    # vLLM
    "truncate_prompt_tokens": UnusedField("an input that is too long is refused"),
    "embed_dtype": UnusedField("vectors have float32 numbers", ("float32",)),
    "use_activation": UnusedField("use normalize"),
}

_NO_BILLS = "nothing is billed"
_NO_CALLS = "the server calls no tools; call them in the client"
MESSAGES: UnusedFields = {
    **{name: field for name, field in COMMON.items() if name != "stop_sequences"},
    # Anthropic
    "service_tier": ignored("there is only one tier", "auto", "standard_only"),
    "context_management": ignored("messages are never removed from a conversation", {}),
    "inference_geo": ignored("the server is in one place"),
    "speed": ignored("there is only one speed", "standard"),
    "diagnostics": ignored(_NO_RECORDS),
    "fallbacks": ignored(_ONE_MODEL, []),
    "fallback_credit_token": ignored(_NO_BILLS),
    "billing_policy": ignored(_NO_BILLS),
    "user_profile_id": ignored(_NO_BILLS),
    "workspace_id": ignored(_NO_BILLS),
    "betas": ignored("features have fields of their own", []),
    "anthropic_beta": ignored("features have fields of their own", []),
    "anthropic_version": ignored("there is only one version"),
    "container": UnusedField(_NO_CALLS),
    "mcp_servers": UnusedField(_NO_CALLS, ([],)),
    "compaction": UnusedField("conversations are not summarized"),
    "thread": UnusedField("a call has no session: send the whole conversation"),
    # names of chats
    "max_completion_tokens": UnusedField("use max_tokens"),
    "response_format": UnusedField("use output_config.format"),
    "reasoning_effort": UnusedField("use output_config.effort"),
    "parallel_tool_calls": UnusedField("use tool_choice.disable_parallel_tool_use"),
    "n": UnusedField("a call has one answer", (1,)),
    "logprobs": UnusedField("answers have no log probabilities", (False,)),
    "stream_options": ignored("streams have a usage"),
}

_OF_AGENTS = (
    *("service_tier", "safety_identifier", "user_security_context", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "provider_specific_fields", "cache_control", "provider", "models", "route"),
    *("rid", "cache_prompt", "id_slot", "keep_alive", "ttl", "session_id", "trace", "data_parallel_rank"),
)
RESPONSES: UnusedFields = {
    **{name: COMMON[name] for name in _OF_AGENTS},
    # OpenAI
    "background": UnusedField("an answer is returned by its own call", (False,)),
    "conversation": UnusedField("use previous_response_id"),
    "prompt": UnusedField("put the text into instructions and input"),
    "context_management": UnusedField("a conversation is never compacted; use truncation", ([],)),
    "moderation": UnusedField("nothing is moderated"),
    "max_tool_calls": ignored("the server calls no tools"),
    "client_metadata": ignored(_NO_RECORDS, {}),
    "access_programs": ignored("all keys have the same access", {}),
    "image": ignored("the model reads text only", {}),
    "personality": ignored("put a personality into instructions"),
    # names of chats
    "messages": UnusedField("use input", ([],)),
    "max_tokens": UnusedField("use max_output_tokens"),
    "max_completion_tokens": UnusedField("use max_output_tokens"),
    "response_format": UnusedField("use text.format"),
    "reasoning_effort": UnusedField("use reasoning.effort"),
    "n": UnusedField("a response has one answer", (1,)),
    "logprobs": UnusedField("use include and top_logprobs", (False,)),
    # vLLM
    "previous_input_messages": UnusedField("put all messages into input"),
    "mm_processor_kwargs": UnusedField("input is text only", ({},)),
}

TOKENIZE: UnusedFields = {
    "chat_template": CHAT["chat_template"],
}

ADAPTER: UnusedFields = {
    "lora_int_id": ignored("an adapter is known by its name"),  # vLLM
}

NOTHING: UnusedFields = {}


def check_unused(known: UnusedField | None, name: str, value: object) -> bool:
    """Check a field outside the table of an object, with a value that is not null. True if it is ignored.

    Raises:
        ApiError: the field is unknown, or its value is refused.
    """
    if known is None:
        message = f"unknown parameter: {name[:100]!r}; leave it out, or start the server with --unknown-fields ignore"
        raise ApiError(400, message, name[:100], code="unknown_parameter")
    if known.takes(value):
        return False
    if not known.is_ignored:
        what = " or ".join([*(msgspec.json.encode(one).decode() for one in known.values), "null"])
        message = f"{name} must be {what} here: {known.reason}"
        raise ApiError(400, message, name, code="unsupported_parameter")
    return True


def _kinds(value: object) -> tuple[type, ...]:
    """The types accepted for a value: 0 may be sent as 0.0, but not as false, although Python treats both as equal."""
    return (int, float) if type(value) is int else (type(value),)
