"""The table of commands: what each flag needs of other flags. That of an engine's settings is `assembly/support.py`."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError


class FlagNeed(NamedTuple):
    """A flag honoured beside some other flags only."""

    flag: str  # the name of its field
    is_met: Callable[[Any], bool]  # takes the values of the flags, or the settings made of them
    reason: str  # a format with the field `f`, these values


def _each(
    flags: Collection[str], is_met: Callable[[Any], bool], reason: str
) -> tuple[FlagNeed, ...]:
    return tuple(FlagNeed(flag, is_met, reason.replace("FLAG", flag)) for flag in flags)


def _is_same(one: str | Path, other: str | Path) -> bool:
    one = Path(one)
    other = Path(other)
    return one.absolute() == other.absolute() or (
        one.exists() and other.exists() and one.samefile(other)
    )


def _is_at_once(f: Any) -> bool:
    return math.inf in f.rates and (f.num_requests is None or f.has_times)


MTLS = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")
_OF_HOSTS = (
    "node_rank",
    "master_addr",
    "master_port",
    "cluster_key_file",
    "control_timeout",
    "restart_workers",
    *MTLS,
)
_OF_EVENTS = ("kv_events_replay_endpoint", "kv_events_topic", "kv_events_allow_remote")
_OF_ENGINE = tuple(
    field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"
)
_OF_MODEL = tuple(
    field.name
    for field in dataclasses.fields(ServerConfig)
    if field.metadata.get("group") == "model" and field.name != "served_model_name"
)
_OF_OPEN_LOOP = (
    "endpoint", "prompts", "vocab_size", "max_model_len", "api_key", "extra_body", "timeout", "request_rate",
    "burstiness", "duration", "warmup_requests", "seed", "trace", "trace_data", "length_scale", "num_requests",
    "goodput", "save", "plot", "write_trace",
)  # fmt: skip
_NO_SOCKET = "has no effect on replicas, whose HTTP is that of Ray Serve; leave it out"
_OF_GANG = "is chosen by each replica for its ranks; leave it out, and set only --nnodes"

# fmt: off
FLAG_NEEDS: Mapping[str, tuple[FlagNeed, ...]] = {
    "serve": (
        *_each(("host", "port"), lambda f: f.uds is None, "cannot be combined with --uds; use one of them"),
        FlagNeed("allowed_hosts", lambda f: f.uds is None, "has no effect with --uds, where no name is checked"),
        FlagNeed("ssl_keyfile", lambda f: f.ssl_certfile is not None, "needs --ssl-certfile, its certificate"),
        FlagNeed("ssl_certfile", lambda f: f.ssl_keyfile is not None, "needs --ssl-keyfile, its private key"),
        FlagNeed("ssl_ca_certs", lambda f: f.ssl_certfile is not None, "needs --ssl-certfile and --ssl-keyfile"),
        FlagNeed("allow_credentials", lambda f: f.allowed_origins and "*" not in f.allowed_origins,
            "needs --allowed-origins with origins other than '*'"),
        FlagNeed("cache_salt_per_key", lambda f: f.api_key or f.api_key_file is not None,
            "needs --api-key-file or --api-key"),
        FlagNeed("admin_key_file", lambda f: f.weights_root is not None, "needs --weights-root"),
        FlagNeed("weights_root", lambda f: f.admin_key_file is not None, "needs --admin-key-file"),
        *_each(_OF_EVENTS, lambda f: f.kv_events_endpoint is not None, "needs --kv-events-endpoint"),
        FlagNeed("lora_dir", lambda f: f.engine.enable_lora, "needs --enable-lora"),
        FlagNeed("lora_modules", lambda f: f.engine.lora_paths.keys().isdisjoint(f.names),
            "a name of an adapter is the name of the model too ({f.names[0]}); choose another one"),
        FlagNeed("node_rank", lambda f: 0 <= f.node_rank < max(f.nnodes, 1),
            "must be from 0 to the number before --nnodes {f.nnodes}, got {f.node_rank}"),
        FlagNeed("restart_engine", lambda f: f.nnodes == 1,
            "needs --nnodes 1: the other processes have ended with the engine; give --restart-workers to all of them"),
        *_each(MTLS, lambda f: None not in [getattr(f, name) for name in MTLS], "needs the other files of mutual TLS"),
    ),
    "serve without --nnodes": _each(_OF_HOSTS, lambda f: False, "needs --nnodes"),
    "serve with --nnodes": (
        FlagNeed("nnodes", lambda f: f.cluster_key_file is not None,
            "needs --cluster-key-file, also on one machine, whose other users could join; make one with: python -m "
            "orca_jax.cluster keygen FILE, or start all processes with: python -m orca_jax.cluster launch"),
    ),
    "batch": (
        *_each(("api_key_file", "max_retries", "request_timeout"), lambda f: f.base_url is not None,
               "is only for a server; it requires --base-url"),
        *_each((*_OF_MODEL, *(name for name in _OF_ENGINE if name != "progress")), lambda f: f.base_url is None,
               "is only for an engine in this process; leave it out with --base-url"),
        FlagNeed("served_model_name", lambda f: f.base_url is None or len(f.server.served_model_name) <= 1,
            "must be one name with --base-url: that of prompts without a model"),
        FlagNeed("model", lambda f: f.base_url is None or not f.server.served_model_name,
            "has no effect beside --served-model-name with --base-url; leave one of them out"),
        FlagNeed("output", lambda f: not _is_same(f.output, f.input),
            "is the same file as --input; choose another output file"),
        FlagNeed("overwrite", lambda f: not _is_same(f.output.with_name(f.output.name + ".old"), f.input),
            "would rename the output to --input; choose another output file"),
        FlagNeed("trace_file", lambda f: not _is_same(f.server.engine.trace_file, f.input),
            "is the same file as --input; choose another file for the timeline"),
        FlagNeed("trace_file", lambda f: not _is_same(f.server.engine.trace_file, f.output),
            "is the same file as --output; choose another file for the timeline"),
    ),
    "generate, chat": (
        FlagNeed("api_key_file", lambda f: f.base_url is not None, "needs --base-url"),
        *_each(_OF_ENGINE, lambda f: f.base_url is None, "has no effect on the server at --base-url; leave it out"),
    ),
    "bench online": (
        *_each(("pace", "server_flags"), lambda f: f.base_url is None,
               "FLAG is for the servers of this benchmark; leave it out with --base-url"),
        *_each(_OF_OPEN_LOOP, lambda f: f.is_open or f.base_url is not None, "FLAG needs --base-url"),
        *_each(_OF_OPEN_LOOP, lambda f: f.is_open, "FLAG is for the open loop; leave out --clients, --tokens"),
    ),
    "bench online, closed loop": (
        FlagNeed("base_url", lambda f: f.model is not None, "base_url and model must be given together"),
        FlagNeed("model", lambda f: f.base_url is not None, "base_url and model must be given together"),
    ),
    "bench online, open loop": (
        FlagNeed("burstiness", lambda f: not f.has_times,
            "burstiness is for drawn arrivals; trace {f.trace} has the bursts of its file; leave it out"),
        FlagNeed("burstiness", lambda f: any([rate != math.inf for rate in f.rates]),
            "burstiness needs a finite --request-rate"),
        FlagNeed("max_model_len", lambda f: f.has_times,
            "max_model_len is for trace files; trace {f.trace} has lengths of its own; leave it out"),
        FlagNeed("duration", lambda f: not _is_at_once(f),
            "duration needs a finite --request-rate; or give --num-requests instead"),
        FlagNeed("write_trace", lambda f: len(f.rates) == 1,
            "write_trace is for one pass; give a single --request-rate"),
        FlagNeed("prompts", lambda f: f.prompts != "ids" or f.endpoint != "chat",
            "prompts must be text for --endpoint chat, which has no token ids"),
    ),
    "bench, workloads": (
        FlagNeed("trace_data", lambda f: f.has_file, "trace {f.trace} is generated; leave trace_data out"),
        FlagNeed("length_scale", lambda f: f.has_file, "trace {f.trace} is generated; leave length_scale out"),
        FlagNeed("trace", lambda f: not f.has_file or f.trace_data is not None,
            "trace {f.trace} needs a file; give trace_data"),
    ),
    "bench schedulers": (
        FlagNeed("redraw", lambda f: f.plot is not None, "redraw needs the file to write; give --plot"),
        FlagNeed("plot", lambda f: f.load or f.redraw is not None, "plot needs arrival rates; give --load"),
    ),
    "timeline, bench burst, bench replay": (
        FlagNeed("plot_unit", lambda f: f.plot is not None, "plot_unit has no effect without --plot; give both"),
    ),
    "deploy.ray_serve": (
        *_each(("uds", "read_timeout", "write_timeout", "kv_events_endpoint"), lambda f: False, _NO_SOCKET),
        *_each(("node_rank", "master_addr", "master_port", "cluster_key_file"), lambda f: False, _OF_GANG),
        FlagNeed("replica_cpus", lambda f: f.nnodes == 1 or f.replica_cpus > 0, "must be positive with --nnodes"),
        FlagNeed("trace_file", lambda f: f.replicas == 1 and f.max_replicas is None,
            "several replicas cannot share one file"),
    ),
    "deploy.ray_serve, replicas": (
        FlagNeed("max_replicas", lambda f: f.max_replicas >= f.replicas,
            "must be at least --replicas, got {f.max_replicas}"),
        FlagNeed("target_ongoing_requests", lambda f: f.max_replicas is not None, "needs --max-replicas"),
    ),
    "plan": (
        FlagNeed("compile", lambda f: f.most > 0,
            "compile needs a TPU, one of {f.known}, got {f.devices}; leave --compile out"),
        FlagNeed("compile", lambda f: f.tensor <= f.most,
            "compile supports at most {f.most} devices, got {f.tensor}; leave --compile out"),
    ),
}
# fmt: on
"""By command; docs/flags.md lists them. The order is that of the checks."""


def check_needs(command: str, values: Any, used: Collection[str]) -> None:
    """Refuse a flag that the command cannot honour beside the others.

    Args:
        command: a key of `FLAG_NEEDS`.
        values: the flags, or the settings made of them.
        used: the flags on the command line, or those with another value than the default.

    Raises:
        ConfigError: `param` names the flag.
    """
    for need in FLAG_NEEDS[command]:
        if need.flag in used and not need.is_met(values):
            raise ConfigError(need.reason.format(f=values), param=need.flag)


def changed(*settings: Any) -> set[str]:
    """Return the fields of dataclasses with another value than their default."""
    return {
        field.name
        for each in settings
        for field in dataclasses.fields(each)
        if field.default is not dataclasses.MISSING and getattr(each, field.name) != field.default
    }
