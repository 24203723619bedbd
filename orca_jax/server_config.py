"""Settings of the server beside those of the engine. `serve/args.py` makes one flag for each field."""

import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from orca_jax.checks import check_values, names_checked
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.request import MAX_LOGPROBS
from orca_jax.startup import ClusterConfig

MIB = 2**20


def flag_field(default: Any, group: str, *, shown: bool = True) -> Any:
    """A field with its group in `--help`; `shown=False` keeps a secret out of `repr`."""
    return field(default=default, repr=shown, metadata={"group": group})


@names_checked(ConfigError)
@dataclass(frozen=True)
class ServerConfig:
    """Settings of the front end. Times are seconds; `None` means no limit, or the default that its help names.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or not one of its choices; `param` names it.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)

    host: str = flag_field("127.0.0.1", "address")
    port: int = flag_field(8000, "address")
    uds: str | None = flag_field(None, "address")
    root_path: str = flag_field("", "address")
    ssl_keyfile: str | None = flag_field(None, "address")
    ssl_certfile: str | None = flag_field(None, "address")
    ssl_ca_certs: str | None = flag_field(None, "address")

    served_model_name: tuple[str, ...] = flag_field((), "model")
    chat_template: str | None = flag_field(None, "model")
    generation_config: str = flag_field("auto", "model")
    tool_call_parser: (
        Literal[
            "cohere_command3",
            "deepseek_v3",
            "deepseek_v31",
            "functiongemma",
            "gemma4",
            "glm45",
            "glm47",
            "granite",
            "hermes",
            "hunyuan_a13b",
            "kimi_k2",
            "lfm2",
            "llama3_json",
            "llama4_json",
            "llama4_pythonic",
            "minimax_m2",
            "mistral",
            "nemotron_json",
            "olmo3",
            "openai",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
            "seed_oss",
        ]
        | None
    ) = flag_field(None, "model")
    reasoning_parser: (
        Literal[
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "mistral",
            "none",
            "olmo3",
            "openai_gptoss",
            "qwen3",
            "seed_oss",
        ]
        | None
    ) = flag_field(None, "model")
    unknown_fields: Literal["refuse", "ignore"] = flag_field("refuse", "model")
    max_logprobs: int = flag_field(MAX_LOGPROBS, "model")

    api_key: tuple[str, ...] = flag_field((), "access", shown=False)
    api_key_file: str | None = flag_field(None, "access")
    admin_key_file: str | None = flag_field(None, "access")
    weights_root: str | None = flag_field(None, "access")
    cache_salt_per_key: bool = flag_field(False, "access")
    allowed_origins: tuple[str, ...] = flag_field((), "access")
    allowed_hosts: tuple[str, ...] = flag_field((), "access")
    lora_dir: str | None = flag_field(None, "access")
    allow_credentials: bool = flag_field(False, "access")

    playground: bool | None = flag_field(None, "access")

    max_num_queued_reqs: int = flag_field(1024, "limits")
    max_calls_per_key: int | None = flag_field(None, "limits")
    max_num_queued_tokens: int = flag_field(4000000, "limits")
    overload_status: Literal[429, 503] = flag_field(503, "limits")
    queue_timeout: float | None = flag_field(None, "limits")
    request_timeout: float | None = flag_field(None, "limits")
    read_timeout: float = flag_field(30.0, "limits")
    write_timeout: float = flag_field(30.0, "limits")
    max_body_bytes: int = flag_field(32 * MIB, "limits")

    responses_store: int = flag_field(64, "limits")

    shutdown_timeout: float = flag_field(30.0, "lifecycle")
    restart_engine: bool = flag_field(False, "lifecycle")
    heartbeat_timeout: float = flag_field(3.0, "lifecycle")
    step_timeout: float | None = flag_field(None, "lifecycle")
    load_timeout: float = flag_field(1800.0, "lifecycle")

    nnodes: int = flag_field(1, "hosts")
    node_rank: int = flag_field(0, "hosts")
    master_addr: str = flag_field("127.0.0.1", "hosts")
    master_port: int = flag_field(29501, "hosts")
    cluster_key_file: str | None = flag_field(None, "hosts")
    control_timeout: float = flag_field(5.0, "hosts")
    mtls_cert_file: str | None = flag_field(None, "hosts")
    mtls_key_file: str | None = flag_field(None, "hosts")
    mtls_ca_file: str | None = flag_field(None, "hosts")

    log_format: Literal["text", "json"] = flag_field("text", "observability")
    log_requests: bool = flag_field(True, "observability")
    otlp_traces_endpoint: str | None = flag_field(None, "observability")

    kv_events_endpoint: str | None = flag_field(None, "observability")
    kv_events_replay_endpoint: str | None = flag_field(None, "observability")
    kv_events_topic: str | None = flag_field(None, "observability")
    kv_events_allow_remote: bool = flag_field(False, "observability")

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in the API."""
        return self.served_model_name or (self.engine.model,)

    @property
    def has_playground(self) -> bool:
        """True if the server has the playground."""
        return self.playground if self.playground is not None else self.uds is None and _is_loopback(self.host)

    @property
    def cluster(self) -> ClusterConfig | None:
        """The settings of several processes; None for one."""
        if self.nnodes == 1:
            return None
        certificate, key, authorities = self.mtls_cert_file, self.mtls_key_file, self.mtls_ca_file
        return ClusterConfig(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            master_port=self.master_port,
            cluster_key_file=self.cluster_key_file,
            control_timeout=self.control_timeout,
            join_timeout=self.load_timeout,
            mtls=(certificate, key, authorities) if certificate and key and authorities else None,
        )

    @property
    def kv_events(self) -> "KvEvents | None":
        """Settings of the events of the prefix cache; None without an address."""
        if self.kv_events_endpoint is None:
            return None
        topic = self.kv_events_topic or f"kv@{socket.gethostname()}@{self.names[0]}"
        return KvEvents(self.kv_events_endpoint, topic, self.kv_events_replay_endpoint)


@dataclass(frozen=True)
class KvEvents:
    """Addresses and topic of the events of the prefix cache."""

    endpoint: str
    topic: str
    replay_endpoint: str | None = None


def endpoint_fault(endpoint: str, *, allows_remote: bool) -> str | None:
    """The fault of a ZeroMQ address to listen on; None if it can be used.

    An address that other machines can reach is a fault unless `allows_remote` is set.
    """
    kind, separator, place = endpoint.partition("://")
    if kind == "ipc" and separator and place:
        return None
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        return f"must be an address such as tcp://127.0.0.1:5557 or ipc:///run/events, got {endpoint!r}"
    if allows_remote or _is_loopback(host):
        return None
    return f"{endpoint} can be reached from other machines; use 127.0.0.1, or allow it with --kv-events-allow-remote"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, or * for all interfaces
        return host == "localhost"
