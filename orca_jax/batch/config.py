"""Settings of a batch run, with one flag for each field."""

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from orca_jax.batch.output import old_path
from orca_jax.batch.rows import COMPLETIONS, LineFormat
from orca_jax.build.scheduler import num_rows
from orca_jax.build.settings import adapted, is_toy
from orca_jax.checks import check_values, names_checked
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.flags import BRIEF, FlagParser, add_engine_args, add_field_args, engine_config_from_args, program
from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema import completion_parser
from orca_jax.openai.schema.limits import MAX_ANSWERS
from orca_jax.request import MAX_LOGPROBS
from orca_jax.server_config import ServerConfig

DESCRIPTION = "Answer a file of requests with an engine in this process or with an OpenAI-compatible server."
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
_OF_REMOTE = ("api_key_file", "max_retries", "request_timeout")


def _flag(default: Any, group: str, text: str) -> Any:
    return field(default=default, metadata={"group": group, "help": text})


@names_checked(ConfigError)
@dataclass(frozen=True)
class BatchConfig:
    """Settings of a run. Times are in seconds.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or not one of its choices; `param` names it.
    """

    input: Path
    output: Path
    server: ServerConfig = field(default_factory=ServerConfig)  # only its engine and model fields are used

    format: Literal["auto", "jsonl", "text"] = _flag(
        "auto",
        "batch",
        "input format: one JSON object or one prompt per line; auto: text if the file name ends in .txt",
    )
    body: str = _flag("{}", "batch", "JSON object with completion fields for prompts, such as max_tokens")
    order: Literal["input", "finished"] = _flag(
        "input", "batch", "order of the output rows; finished: write each row as soon as it is answered"
    )
    overwrite: bool = _flag(
        False, "batch", "start again; the output so far is renamed to FILE.old when the first new row is ready"
    )
    concurrency: int | None = _flag(
        None,
        "batch",
        f"number of concurrent requests; default: twice --max-num-seqs, or {REMOTE_CONCURRENCY} with --base-url",
    )

    base_url: str | None = _flag(
        None, "server", "URL of an OpenAI-compatible server to send the rows to, instead of starting an engine"
    )
    api_key_file: str | None = _flag(
        None, "server", "file with the API key of the server (keeps the key out of process lists)"
    )
    max_retries: int = _flag(6, "server", "retries of a request after 408, 409, 429, 5xx or a lost connection")
    request_timeout: float = _flag(600.0, "server", "seconds to wait for an answer")

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def line_format(self) -> LineFormat:
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
        engine = self.server.engine
        return REMOTE_CONCURRENCY if self.base_url is not None else 2 * num_rows(engine)

    @property
    def meaning(self) -> dict[str, Any]:
        """The settings that determine the rows of the output."""
        server, engine = self.server, self.server.engine
        return {
            **{name: getattr(self, name) for name in _MEANING},
            "format": self.line_format,
            "body": self.defaults,
            **{name: getattr(server, name) for name in _model_names()},
            **{name: getattr(engine, name) for name in _MEANING_OF_ENGINE},
        }


def parse_args(argv: Sequence[str] | None = None) -> BatchConfig:
    """Parse the flags. For unknown flags or wrong types, argparse ends the process with code 2.

    Raises:
        ConfigError: a value or a combination of values is wrong; `param` names the flag.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    of_model = {name: getattr(args, name) for name in _model_names()}
    of_model = {name: tuple(value) if isinstance(value, list) else value for name, value in of_model.items()}
    own = {field.name: getattr(args, field.name) for field in _own_fields()}
    engine = engine_config_from_args(args)
    if args.base_url is None:
        engine = for_throughput(engine)
    config = BatchConfig(args.input, args.output, server_config(engine, **of_model), **own)
    check(config)
    _check_place(config, parser.given(argv))
    return config


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    name = program("batch")
    usage = f"{name} -i INPUT -o OUTPUT [flags]"
    brief = {*BRIEF, "input", "output", "format", "body", "order", "overwrite", "base_url"}
    parser = FlagParser(name, usage, brief=brief, description=DESCRIPTION)
    parser.add_argument(
        "-i", "--input", type=Path, required=True, metavar="FILE", help="input file with one request per line"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="output file with one answer per line"
    )
    add_field_args(parser, BatchConfig, _own_fields())
    add_field_args(parser, ServerConfig, _model_fields())
    add_engine_args(parser)
    return parser


def for_throughput(engine: EngineConfig) -> EngineConfig:
    """Settings with a later target for the time between tokens, since they are not read as they come."""
    if engine.itl_target_ms is not None or is_toy(engine.model):
        return engine
    return adapted(replace(engine, itl_target_ms=ITL_TARGET_MS))  # without effect under other schedulers


def server_config(engine: EngineConfig, **settings: Any) -> ServerConfig:
    """Settings of a front end with a queue that is never full: the window limits the open rows."""
    most = MAX_CONCURRENCY * MAX_ANSWERS
    return ServerConfig(
        engine, max_num_queued_reqs=most, max_num_queued_tokens=most * 2**20, log_requests=False, **settings
    )


def check(config: BatchConfig) -> None:
    """Check the settings. Raises ConfigError; `param` names the flag."""
    window = config.concurrency
    holds = window is None or 1 <= window <= MAX_CONCURRENCY
    _require(holds, "concurrency", f"must be in 1..{MAX_CONCURRENCY}, got {window}")
    _require(config.max_retries >= 0, "max_retries", f"must be at least 0, got {config.max_retries}")
    holds = math.isfinite(config.request_timeout) and config.request_timeout > 0
    _require(holds, "request_timeout", f"must be a number of seconds above 0, got {config.request_timeout}")
    holds = 0 <= config.server.max_logprobs <= MAX_LOGPROBS
    _require(holds, "max_logprobs", f"must be in 0..{MAX_LOGPROBS}, got {config.server.max_logprobs}")
    _check_files(config)
    _check_body(config)
    _check_place(config)


def _check_files(config: BatchConfig) -> None:
    """Refuse to write to a file that the run reads or writes already."""
    _require(
        not _is_same(config.output, config.input), "output", "is the same file as --input; choose another output file"
    )
    is_moved = config.overwrite and _is_same(old_path(config.output), config.input)
    _require(not is_moved, "output", "would be renamed to --input by --overwrite; choose another output file")
    if config.server.engine.trace_file is not None:
        timeline = Path(config.server.engine.trace_file)
        for name, path in (("input", config.input), ("output", config.output)):
            message = f"is the same file as --{name}; choose another file for the timeline"
            _require(not _is_same(timeline, path), "trace_file", message)


def _is_same(one: Path, other: Path) -> bool:
    return one.absolute() == other.absolute() or (one.exists() and other.exists() and one.samefile(other))


def _check_body(config: BatchConfig) -> None:
    """Check the fields for prompts, as far as possible without the model."""
    try:
        fields = json.loads(config.body)
    except (ValueError, RecursionError):
        fields = None
    example = '{"max_tokens": 64, "temperature": 0}'
    _require(isinstance(fields, dict), "body", f"must be a JSON object such as '{example}'")
    _require("prompt" not in fields, "body", "must not contain a prompt: prompts come from --input")
    if config.base_url is not None:
        return  # another server may support other fields
    try:
        body = json.dumps({"model": config.model, **fields, "prompt": ""}).encode()
        completion_parser.parse(body, ignores_unknown=config.server.unknown_fields == "ignore")
    except ApiError as error:
        raise ConfigError(f"is not a valid body of {COMPLETIONS}: {error.message}", param="body") from None


def _check_place(config: BatchConfig, given: Collection[str] = ()) -> None:
    """Refuse settings of an engine together with --base-url, and settings of a server without it.

    Args:
        given: settings that count as set although they may have their default values.
    """

    def is_set(owner: object, name: str) -> bool:
        return name in given or not _is_default(owner, name)

    if config.base_url is None:
        for name in _OF_REMOTE:
            _require(not is_set(config, name), name, "is only for a server; it requires --base-url")
        return
    _require(_is_base_url(config.base_url), "base_url", "must be a URL such as http://localhost:8000")
    for name in _model_names():
        holds = name == "served_model_name" or not is_set(config.server, name)
        _require(holds, name, "is only for an engine in this process; leave it out with --base-url")
    for one in dataclasses.fields(EngineConfig):
        if one.name not in ("model", "progress"):
            holds = not is_set(config.server.engine, one.name)
            _require(holds, one.name, "is only for an engine in this process; leave it out with --base-url")
    names = config.server.served_model_name
    _require(len(names) <= 1, "served_model_name", "must be one name with --base-url: that of prompts without a model")
    has_two = bool(names) and is_set(config.server.engine, "model")
    _require(not has_two, "model", "has no effect beside --served-model-name with --base-url; leave one of them out")


def _is_base_url(text: str) -> bool:
    """True if the text is a URL to which a path can be added."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and url.host != "" and not url.query and not url.fragment


def _own_fields() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(BatchConfig) if "group" in field.metadata]


def _model_fields() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(ServerConfig) if field.metadata.get("group") == "model"]


def _model_names() -> list[str]:
    return [field.name for field in _model_fields()]


def _is_default(config: Any, name: str) -> bool:
    return any(one.name == name and getattr(config, name) == one.default for one in dataclasses.fields(config))


def _require(holds: bool, param: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, param=param)
