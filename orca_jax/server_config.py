"""Settings of the server, beside the engine's: one field, one flag. `server_args.py` makes the flags."""

from dataclasses import dataclass, field
from typing import Any, Literal

from orca_jax.config import EngineConfig
from orca_jax.request import MAX_LOGPROBS

MIB = 2**20


def _flag(default: Any, group: str, text: str, *, shown: bool = True) -> Any:
    """A field with what `--help` says of it; a secret is not shown by `repr`."""
    return field(default=default, repr=shown, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class ServerConfig:
    """What the front end needs to know. Times are seconds; `None` means none, or what the help text says."""

    engine: EngineConfig = field(default_factory=EngineConfig)

    host: str = _flag("127.0.0.1", "address", "address to listen on")
    port: int = _flag(8000, "address", "0 takes a free one")
    uds: str | None = _flag(None, "address", "listen on this Unix socket instead, which only its owner can open")
    root_path: str = _flag("", "address", "prefix under which a proxy publishes the server")
    ssl_keyfile: str | None = _flag(None, "address", "private key, for HTTPS")
    ssl_certfile: str | None = _flag(None, "address", "certificate, for HTTPS")
    ssl_ca_certs: str | None = _flag(None, "address", "authorities that sign the certificates clients must show")

    served_model_name: tuple[str, ...] = _flag(
        (), "model", "names of the model in the API, the first of them in answers; default: what --model says"
    )
    chat_template: str | None = _flag(None, "model", "file with the chat template; default: the model directory's own")
    generation_config: str = _flag(
        "auto", "model", '"auto" takes sampling defaults from the model directory, "none" does not; or a directory'
    )
    tool_call_parser: Literal["hermes", "llama3_json", "mistral"] | None = _flag(
        None, "model", 'how the model writes tool calls of its own accord, for tool_choice "auto"'
    )
    max_logprobs: int = _flag(MAX_LOGPROBS, "model", "most probable tokens that a request may ask for")

    api_key: tuple[str, ...] = _flag(
        (), "access", "keys, one of which every request but /live and /health must bring", shown=False
    )
    api_key_file: str | None = _flag(None, "access", "file with one key a line, where no process list shows them")
    cache_salt_per_key: bool = _flag(
        False,
        "access",
        "requests of different keys never share computed prefixes, nor learn by time that one was there",
    )
    allowed_origins: tuple[str, ...] = _flag((), "access", "origins whose pages may call the server; default: none")
    allow_credentials: bool = _flag(False, "access", "let such pages send credentials")

    max_num_queued_reqs: int = _flag(
        1024, "pressure", "requests that may wait beyond those that can run; further ones are refused"
    )
    max_num_queued_tokens: int = _flag(4_000_000, "pressure", "prompt tokens that may wait for their first iteration")
    overload_status: Literal[429, 503] = _flag(503, "pressure", "status of a refused request")
    queue_timeout: float | None = _flag(None, "pressure", "longest wait for a first token; a request may ask for less")
    request_timeout: float | None = _flag(None, "pressure", "longest time for a whole call; a request may ask for less")
    read_timeout: float = _flag(30.0, "pressure", "longest time for a client to send a request")
    write_timeout: float = _flag(30.0, "pressure", "longest time for a client to take what was sent")
    max_body_bytes: int = _flag(32 * MIB, "pressure", "longest body of a request")

    shutdown_timeout: float = _flag(30.0, "life", "after SIGTERM, time for running requests to end")
    restart_engine: bool = _flag(False, "life", "start the engine again when it dies or hangs")
    heartbeat_timeout: float = _flag(3.0, "life", "silence after which a serving engine counts as hung")
    step_timeout: float = _flag(120.0, "life", "longest iteration of the engine before it counts as hung")
    load_timeout: float = _flag(1800.0, "life", "longest time to load and compile")

    log_format: Literal["text", "json"] = _flag("text", "observability", "how log lines look")
    log_requests: bool = _flag(True, "observability", "write a line for every request")
    otlp_traces_endpoint: str | None = _flag(
        None, "observability", "OpenTelemetry collector that gets a span for every request; needs the otel extra"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model."""
        return self.served_model_name or (self.engine.model,)
