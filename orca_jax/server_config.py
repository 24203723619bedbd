"""Settings of the server beside those of the engine. `serve/args.py` makes one flag for each field."""

import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal

from orca_jax.text import reasoning
from orca_jax.text.calls.dialects import BY_NAME
from orca_jax.values.checks import check_values, json_value, names_checked, short, whole_number
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import MAX_LOGPROBS
from orca_jax.values.startup import ClusterConfig

MIB = 2**20

if TYPE_CHECKING:
    ToolCallParser = str
    ReasoningParserName = str
else:  # the rows of two tables are their values
    ToolCallParser = Literal[tuple(sorted(BY_NAME))]
    ReasoningParserName = Literal[tuple(sorted(reasoning.PARSERS))]


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
    override_generation_config: str | None = flag_field(None, "model")
    default_chat_template_kwargs: str | None = flag_field(None, "model")
    calibration: str | None = flag_field(None, "model")
    tool_call_parser: ToolCallParser | None = flag_field(None, "model")
    reasoning_parser: ReasoningParserName | None = flag_field(None, "model")
    unknown_fields: Literal["refuse", "ignore"] = flag_field("refuse", "model")
    max_logprobs: int = flag_field(MAX_LOGPROBS, "model")

    api_key: tuple[str, ...] = flag_field((), "access", shown=False)
    api_key_file: str | None = flag_field(None, "access")
    admin_key_file: str | None = flag_field(None, "access")
    weights_root: str | None = flag_field(None, "access")
    cache_salt_per_key: bool | None = flag_field(None, "access")  # None: with more than one key
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
    restart_workers: bool = flag_field(False, "hosts")
    mtls_cert_file: str | None = flag_field(None, "hosts")
    mtls_key_file: str | None = flag_field(None, "hosts")
    mtls_ca_file: str | None = flag_field(None, "hosts")

    log_format: Literal["text", "json"] = flag_field("text", "observability")
    log_requests: bool = flag_field(True, "observability")
    enable_force_include_usage: bool = flag_field(False, "observability")
    explain_cache: bool = flag_field(False, "observability")
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
    def generation_overrides(self) -> dict[str, Any]:
        """The sampling defaults that replace the model's. Raises ConfigError."""
        return _object_of(self.override_generation_config, "override_generation_config")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template for all requests. Raises ConfigError."""
        return _object_of(self.default_chat_template_kwargs, "default_chat_template_kwargs")

    @property
    def has_playground(self) -> bool:
        """True if the server has the playground."""
        if self.playground is None:
            return self.uds is None and _is_loopback(self.host)
        return self.playground

    @property
    def restarts(self) -> bool:
        """True if another engine follows a lost one."""
        return self.restart_engine or self.restart_workers

    @property
    def cluster(self) -> ClusterConfig | None:
        """The settings of several processes; None for one."""
        if self.nnodes == 1:
            return None
        certificate = self.mtls_cert_file
        key = self.mtls_key_file
        authorities = self.mtls_ca_file
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
    host, _, digits = place.rpartition(":")
    port = whole_number(digits)
    if kind != "tcp" or not host or port is None or port > 65535:
        return f"must be an address such as tcp://127.0.0.1:5557 or ipc:///run/events, got {short(endpoint)}"
    if allows_remote or _is_loopback(host):
        return None
    return f"{endpoint} can be reached from other machines; use 127.0.0.1, or allow it with --kv-events-allow-remote"


def _object_of(text: str | None, param: str) -> dict[str, Any]:
    """The object of a setting in JSON; empty if it is not given. Raises ConfigError."""
    try:
        value = {} if text is None else json_value(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"must be an object of JSON, such as {{}}; got {short(text)}", param=param
        )
    return value


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, or * for all interfaces
        return host == "localhost"
