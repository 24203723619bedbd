"""Settings of the server beside those of the engine. `serve/args.py` makes one flag for each field."""

import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from orca_jax.checks import check_values, names_checked
from orca_jax.config import ClusterConfig, EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.request import MAX_LOGPROBS

MIB = 2**20


def _flag(default: Any, group: str, text: str, *, shown: bool = True) -> Any:
    """A field with its group and text in `--help`; `shown=False` keeps a secret out of `repr`."""
    return field(default=default, repr=shown, metadata={"group": group, "help": text})


@names_checked(ConfigError)
@dataclass(frozen=True)
class ServerConfig:
    """Settings of the front end. Times are seconds; `None` means no limit, or the default named in the help text.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or not one of its choices; `param` names it.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)

    host: str = _flag("127.0.0.1", "address", "IP address or host name to listen on")
    port: int = _flag(8000, "address", "port to listen on; 0 chooses a free port")
    uds: str | None = _flag(None, "address", "Unix socket to listen on instead of a port; only its owner can connect")
    root_path: str = _flag("", "address", "path prefix of the server behind a reverse proxy, such as /llm")
    ssl_keyfile: str | None = _flag(None, "address", "private key file for HTTPS")
    ssl_certfile: str | None = _flag(None, "address", "certificate file for HTTPS")
    ssl_ca_certs: str | None = _flag(
        None, "address", "file of certificate authorities; clients must present a certificate signed by one of them"
    )

    served_model_name: tuple[str, ...] = _flag(
        (), "model", "model names in the API; answers use the first one; default: the value of --model"
    )
    chat_template: str | None = _flag(None, "model", "chat template file; default: the template of the model directory")
    generation_config: str = _flag(
        "auto", "model", 'source of sampling defaults: "auto" for the model directory, "none", or a directory'
    )
    tool_call_parser: (
        Literal[
            "hermes", "llama3_json", "llama4_json", "llama4_pythonic", "mistral", "pythonic", "qwen3_coder", "qwen3_xml"
        ]
        | None
    ) = _flag(
        None, "model", "format of the tool calls that the model generates; default: inferred from its chat template"
    )
    reasoning_parser: (
        Literal["deepseek_r1", "glm45", "minimax_m2", "mistral", "none", "olmo3", "qwen3", "seed_oss"] | None
    ) = _flag(
        None,
        "model",
        'tags around the reasoning that the model generates; "none": it is a part of the text; default: inferred from '
        "its chat template",
    )
    unknown_fields: Literal["refuse", "ignore"] = _flag(
        "refuse", "model", "treatment of unknown fields of a request; ignored ones are named in a header of the answer"
    )
    max_logprobs: int = _flag(
        MAX_LOGPROBS, "model", "largest number of log probabilities per token that a request may ask for"
    )

    api_key: tuple[str, ...] = _flag(
        (),
        "access",
        "API keys; every route but /live, /health and the files of the playground requires one of them",
        shown=False,
    )
    api_key_file: str | None = _flag(
        None, "access", "file of API keys, one per line; unlike --api-key it does not show them in process lists"
    )
    admin_key_file: str | None = _flag(
        None,
        "access",
        "file of keys, one per line, for replacing weights by POST /update_weights_from_disk; default: no such route",
    )
    weights_root: str | None = _flag(None, "access", "folder of the checkpoints that may replace the weights")
    cache_salt_per_key: bool = _flag(
        False,
        "access",
        "separate prefix cache for each API key (prevents timing side channels)",
    )
    allowed_origins: tuple[str, ...] = _flag(
        (), "access", "origins of web pages that may call the server (CORS); default: none"
    )
    allowed_hosts: tuple[str, ...] = _flag(
        (),
        "access",
        "host names by which clients call the server, checked in Host and Origin; a server without keys on a loopback "
        "address always checks, and allows IP addresses, localhost and --host",
    )
    lora_dir: str | None = _flag(
        None,
        "access",
        "directory of adapters that callers may load and unload by /v1/load_lora_adapter and /v1/unload_lora_adapter; "
        "default: these routes are off",
    )
    allow_credentials: bool = _flag(False, "access", "allow these web pages to send credentials (CORS)")

    playground: bool | None = _flag(
        None, "access", "playground in the browser at /; default: only if the server listens on a loopback address"
    )

    max_num_queued_reqs: int = _flag(
        1024,
        "limits",
        "largest number of requests that wait beyond those that can run; more are refused by --overload-status",
    )
    max_calls_per_key: int | None = _flag(
        None,
        "limits",
        "largest number of open calls of an API key; more get a 429. All callers of a server without keys count as one",
    )
    max_num_queued_tokens: int = _flag(
        4_000_000, "limits", "largest number of prompt tokens that wait; more are refused by --overload-status"
    )
    overload_status: Literal[429, 503] = _flag(503, "limits", "HTTP status of a request refused by a full queue")
    queue_timeout: float | None = _flag(
        None, "limits", "longest wait for the first token, then 503; a request may set less"
    )
    request_timeout: float | None = _flag(
        None, "limits", "longest time for a request, then 408; a request may set less"
    )
    read_timeout: float = _flag(30.0, "limits", "longest time for a client to send a request, then 408")
    write_timeout: float = _flag(
        30.0, "limits", "longest time without progress of a client that reads an answer; then it is disconnected"
    )
    max_body_bytes: int = _flag(32 * MIB, "limits", "largest request body in bytes; a larger one gets a 413")

    responses_store: int = _flag(
        64,
        "limits",
        "memory in MiB for responses of /v1/responses that later calls continue; the least recently used ones leave; 0 "
        "stores none",
    )

    shutdown_timeout: float = _flag(30.0, "lifecycle", "time after SIGTERM or SIGINT for open requests to finish")
    restart_engine: bool = _flag(False, "lifecycle", "restart the engine if it dies or hangs")
    heartbeat_timeout: float = _flag(3.0, "lifecycle", "time without a heartbeat after which the engine counts as hung")
    step_timeout: float | None = _flag(
        None,
        "lifecycle",
        "longest time without progress of an engine that has work, after which it counts as hung; default: 10 seconds, "
        "or 30 times the measured time of the iterations in flight",
    )
    load_timeout: float = _flag(1800.0, "lifecycle", "longest time for loading and compiling the model")

    nnodes: int = _flag(1, "hosts", "processes that run the engine together, one on each host; see docs/hosts.md")
    node_rank: int = _flag(0, "hosts", "number of this process, from 0; process 0 leads and serves HTTP")
    master_addr: str = _flag("127.0.0.1", "hosts", "address of the leader, reachable from all hosts; it listens there")
    master_port: int = _flag(
        29501, "hosts", "first of three ports of the leader: control, plans, and the coordinator of JAX"
    )
    cluster_key_file: str | None = _flag(
        None, "hosts", "key file of the cluster, the same on all hosts; python -m orca_jax.cluster keygen makes one"
    )
    control_timeout: float = _flag(
        5.0, "hosts", "time of silence or without progress after which a process of the cluster counts as lost"
    )
    mtls_cert_file: str | None = _flag(None, "hosts", "certificate file for the coordinator of JAX (mutual TLS)")
    mtls_key_file: str | None = _flag(None, "hosts", "private key file of this certificate")
    mtls_ca_file: str | None = _flag(None, "hosts", "file of the certificate authorities of the coordinator of JAX")

    log_format: Literal["text", "json"] = _flag("text", "observability", "format of log lines")
    log_requests: bool = _flag(True, "observability", "log every request")
    otlp_traces_endpoint: str | None = _flag(
        None,
        "observability",
        "URL of an OpenTelemetry collector (OTLP over HTTP) for a span per request; needs the otel extra",
    )

    kv_events_endpoint: str | None = _flag(
        None,
        "observability",
        "ZeroMQ address for events of the prefix cache in vLLM's format, such as tcp://127.0.0.1:5557",
    )
    kv_events_replay_endpoint: str | None = _flag(
        None, "observability", "ZeroMQ address to request lost events, such as tcp://127.0.0.1:5558"
    )
    kv_events_topic: str | None = _flag(
        None, "observability", "topic of these events; default: kv@HOSTNAME@MODEL with the first served model name"
    )
    kv_events_allow_remote: bool = _flag(
        False,
        "observability",
        "allow addresses of --kv-events-endpoint that other machines can reach; events hold the token ids of prompts",
    )

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
