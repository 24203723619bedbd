"""Settings of a batch run. Its flags are in `args.py`, and the checks of combinations in `check.py`."""

import dataclasses
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orca_jax.server_config import ServerConfig, flag_field
from orca_jax.values.checks import check_values, names_checked
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError

if TYPE_CHECKING:
    from orca_jax.batch.rows import LineFormat

REMOTE_CONCURRENCY = 64
MAX_CONCURRENCY = 65_536
ITL_TARGET_MS = 1000.0

# A resumed run must have the same values of these. All other settings may change, such as memory limits.
_MEANING = ("order", "base_url")
_MEANING_OF_ENGINE = (
    "model",
    "revision",
    "tokenizer",
    "decoder",
    "load_format",
    "dtype",
    "quantization",
    "lora_modules",
    "kv_cache_dtype",
    "seed",
    "max_model_len",
)


@names_checked(ConfigError)
@dataclass(frozen=True)
class BatchConfig:
    """Settings of a run. Times are in seconds.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or not one of its choices; `param` names it.
    """

    input: Path
    output: Path
    # only its engine and model fields are used
    server: ServerConfig = field(default_factory=ServerConfig)

    format: Literal["auto", "jsonl", "text"] = flag_field("auto", "batch")
    body: str = flag_field("{}", "batch")
    order: Literal["input", "finished"] = flag_field("input", "batch")
    overwrite: bool = flag_field(False, "batch")
    concurrency: int | None = flag_field(None, "batch")

    base_url: str | None = flag_field(None, "server")
    api_key_file: str | None = flag_field(None, "server")
    max_retries: int = flag_field(6, "server")
    request_timeout: float = flag_field(600.0, "server")

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def line_format(self) -> "LineFormat":
        """The format of the input lines."""
        if self.format == "auto":
            return "text" if self.input.suffix == ".txt" else "jsonl"
        return self.format

    @property
    def defaults(self) -> dict[str, Any]:
        """Completion fields for prompts."""
        fields: dict[str, Any] = json.loads(self.body)
        return fields

    @property
    def model(self) -> str:
        """The model for prompts without a model name."""
        return self.server.names[0]

    @property
    def window(self) -> int:
        """Number of rows that may be open at once."""
        if self.concurrency is not None:
            return self.concurrency
        if self.base_url is not None:
            return REMOTE_CONCURRENCY
        from orca_jax.assembly.choices import choices_of

        return 2 * choices_of(self.server.engine).requests.num_rows

    @property
    def meaning(self) -> dict[str, Any]:
        """The settings that determine the rows of the output."""
        server = self.server
        engine = self.server.engine
        return {
            **{name: getattr(self, name) for name in _MEANING},
            "format": self.line_format,
            "body": self.defaults,
            **{name: getattr(server, name) for name in model_names()},
            **{name: getattr(engine, name) for name in _MEANING_OF_ENGINE},
        }


def for_throughput(engine: EngineConfig) -> EngineConfig:
    """Settings with a later target for the time between tokens, since they are not read as they come."""
    from orca_jax.assembly.choices import is_toy
    from orca_jax.assembly.support import adapted

    if engine.itl_target_ms is not None or is_toy(engine.model):
        return engine
    # without effect under other schedulers
    return adapted(replace(engine, itl_target_ms=ITL_TARGET_MS))


def server_config(engine: EngineConfig, **settings: Any) -> ServerConfig:
    """Settings of a front end with a queue that is never full: the window limits the open rows."""
    from orca_jax.serve.openai.schema.limits import MAX_ANSWERS

    most = MAX_CONCURRENCY * MAX_ANSWERS
    return ServerConfig(
        engine,
        max_num_queued_reqs=most,
        max_num_queued_tokens=most * 2**20,
        log_requests=False,
        **settings,
    )


def own_fields() -> list[dataclasses.Field[Any]]:
    """The fields of `BatchConfig` with a flag."""
    return [field for field in dataclasses.fields(BatchConfig) if "group" in field.metadata]


def model_fields() -> list[dataclasses.Field[Any]]:
    """The fields of `ServerConfig` about the model."""
    return [
        field
        for field in dataclasses.fields(ServerConfig)
        if field.metadata.get("group") == "model"
    ]


def model_names() -> list[str]:
    """The names of `model_fields`."""
    return [field.name for field in model_fields()]
