"""The part of Tunix's `Sampler` that a worker meets, as recorded from google/tunix at commit 035dbdb9."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

METHODS: dict[str, list[str]] = {
    "initialize": [],
    "start": ["kwargs"],
    "stop": ["kwargs"],
    "pause": ["kwargs"],
    "resume": ["kwargs"],
    "get_mesh": ["kwargs"],
    "sample": ["sampling_requests", "kwargs"],
    "get_target_state": [],
    "get_weight_sync_metadata": ["kwargs"],
    "bind_weight_sync": ["sync_request", "kwargs"],
    "pre_weight_sync": ["sync_request", "kwargs"],
    "weight_sync": ["sync_request", "kwargs"],
    "post_weight_sync": ["sync_request", "kwargs"],
    "abort_weight_sync": ["sync_request", "kwargs"],
    "get_transfer_status": ["req_id", "kwargs"],
    "migrate_kv_cache": ["source_server_id", "target_server_id", "token_ids", "kwargs"],
    "get_load_info": ["kwargs"],
}
"""The methods and their parameters; `kwargs` takes any names."""
PLAIN = frozenset({"initialize", "get_target_state"})
"""Those that are no coroutines."""


def _refuse(*_: Any) -> None:
    raise AssertionError("a protocol is not called")


Sampler: Any = runtime_checkable(
    type("Sampler", (Protocol,), {"_is_protocol": True, **dict.fromkeys(METHODS, _refuse)})  # type: ignore[arg-type]
)
"""The protocol: `isinstance` is the test of the manager of rollouts."""


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """The parameters of a request, with their defaults."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    return_logprobs: bool = False
    return_logits: bool = False
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = 0
    beam_size: int | None = None


@dataclasses.dataclass(kw_only=True)
class SamplingRequest:
    """A prompt: a text, ids, or a conversation."""

    prompt: Any
    sampling_params: SamplingParams | None = None
    request_id: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class SamplingResponse:
    """An answer. Log probabilities have the shape of the ids."""

    text: str = ""
    prompt_token_ids: Any = None
    token_ids: Any = None
    logprobs: Any = None
    finish_reason: str = "stop"
    routed_experts: Any = None
    request_id: str = ""
    error: Any = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.logprobs is not None and self.logprobs.shape != self.token_ids.shape:
            raise ValueError(f"{self.logprobs.shape} != {self.token_ids.shape}")


@dataclasses.dataclass(kw_only=True)
class LoadInfo:
    """The load of a sampler."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0


@dataclasses.dataclass(kw_only=True)
class ErrorInfo:
    """The error of one answer."""

    error_type: str
    message: str
    retryable: bool = False
    traceback: str = ""


@dataclasses.dataclass(kw_only=True)
class WeightSyncRequest:
    """New weights by reference, and their version."""

    controller_id: str = ""
    policy_version: int = 0
    weights: Any = None
    source_metadata: Any = None
    extra_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    request_id: str = ""
