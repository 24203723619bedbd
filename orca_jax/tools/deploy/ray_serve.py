"""Replicas of the server in Ray Serve (the extra `ray`): `python -m orca_jax.tools.deploy.ray_serve --model MODEL`.

Each replica is one engine on one device, or on one mesh of devices, of one process or of `--nnodes`. Its application is
that of `python -m orca_jax.serve`. Ray Serve's proxy has the only HTTP port.
"""

import dataclasses
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from orca_jax.flags import add_field_args, flag_message, run_program
from orca_jax.flags.needs import changed, check_needs
from orca_jax.helpers.console import lasting_output
from orca_jax.helpers.logs import install_handler
from orca_jax.serve.__main__ import EXIT_CONFIG
from orca_jax.serve.announcement import announcement
from orca_jax.serve.args import make_parser, read_flags
from orca_jax.serve.listen import url_at
from orca_jax.serve.openai.model import check_texts, downloaded
from orca_jax.serve.server import EXIT_ENGINE_DIED
from orca_jax.server_config import ServerConfig, flag_field
from orca_jax.tools.deploy.gang import actor_options
from orca_jax.tools.deploy.replica import EngineReplica
from orca_jax.values.checks import check_values, names_checked, require
from orca_jax.values.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger("orca_jax.tools.deploy.ray_serve")  # `__name__` may be "__main__"

DESCRIPTION = "Serve replicas of one model with Ray Serve."
APPLICATION = "orca-jax"
HEALTH_CHECK_SECONDS = 2.0  # between two checks of a replica
HEALTH_CHECK_TIMEOUT = 10.0
DRAIN_MARGIN = 15.0  # seconds after --shutdown-timeout until Ray kills a replica
RETRY_SECONDS = 1  # `Retry-After` of a call refused by the proxy
TARGET_SHARE = 0.75  # of `--max-num-seqs`: open calls of a replica that autoscaling aims at
WATCH_SECONDS = 1.0  # between two looks at the state of the application
ROUTERS = {
    "balanced": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "session": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
}


@names_checked(ConfigError)
@dataclass(frozen=True)
class RayConfig:
    """Settings of the replicas.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or outside its range; `param` names it.
    """

    replicas: int = flag_field(1, "Ray Serve")
    max_replicas: int | None = flag_field(None, "Ray Serve")
    target_ongoing_requests: float | None = flag_field(None, "Ray Serve")
    replica_cpus: float = flag_field(1.0, "Ray Serve")
    routing: Literal["balanced", "session"] = flag_field("balanced", "Ray Serve")
    ray_address: str | None = flag_field(None, "Ray Serve")

    def __post_init__(self) -> None:
        check_values(self)
        require(self.replicas >= 1, "replicas", f"must be at least 1, got {self.replicas}")
        check_needs("deploy.ray_serve, replicas", self, changed(self))
        target = self.target_ongoing_requests
        require(
            target is None or target > 0,
            "target_ongoing_requests",
            f"must be positive, got {target}",
        )
        require(
            self.replica_cpus >= 0, "replica_cpus", f"must be at least 0, got {self.replica_cpus}"
        )


def app(args: Mapping[str, Any]) -> "Application":
    """Build the application for `serve run orca_jax.tools.deploy.ray_serve:app model=demo`, or for a file of Ray Serve.

    Args:
        args: flags without dashes, with their values; those of the address belong to Ray Serve then.

    Raises:
        ConfigError: a setting is wrong.
    """
    words = {"true": True, "false": False}  # the command line of `serve run` has strings only
    values = {
        name: words.get(value, value) if isinstance(value, str) else value
        for name, value in args.items()
    }
    config, settings = read_settings([], values)
    # The address is not known here. Behind that of all interfaces, clients use names that only the operator knows.
    return application(dataclasses.replace(config, host="0.0.0.0"), settings)


def read_settings(
    argv: Sequence[str] | None, values: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ServerConfig, RayConfig]:
    """Read the flags of the server and of the replicas, and `values` in their place.

    Raises:
        ConfigError: a setting is unknown or wrong; `param` names the flag.
    """
    parser = make_parser("python -m orca_jax.tools.deploy.ray_serve", DESCRIPTION)
    fields = dataclasses.fields(RayConfig)
    add_field_args(parser, RayConfig, fields)
    parser.use_settings(values, "the arguments of the application")
    config, args = read_flags(parser, argv)
    check_needs("deploy.ray_serve", args, changed(config, config.engine) | {"replica_cpus"})
    # a page would see one replica only
    config = dataclasses.replace(config, playground=bool(config.playground))
    return config, RayConfig(**{one.name: getattr(args, one.name) for one in fields})


def application(config: ServerConfig, settings: RayConfig) -> "Application":
    """Build the application of Ray Serve: one deployment of `EngineReplica`. Raises ConfigError without Ray."""
    from ray import serve

    deployment = serve.deployment(
        name="engine",
        max_ongoing_requests=config.engine.max_num_seqs + config.max_num_queued_reqs,
        max_queued_requests=max(1, config.max_num_queued_reqs),
        backpressure_config={"status_code": config.overload_status, "retry_after_s": RETRY_SECONDS},
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.shutdown_timeout + DRAIN_MARGIN,
        health_check_period_s=HEALTH_CHECK_SECONDS,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT,
        request_router_config={"request_router_class": ROUTERS[settings.routing]},
        **resources(config, settings),
        **scaling(config, settings),
    )
    return deployment(serve.ingress()(EngineReplica)).bind(config)


def scaling(config: ServerConfig, settings: RayConfig) -> dict[str, Any]:
    """Ray Serve's settings of the number of replicas."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    target = settings.target_ongoing_requests or max(1.0, TARGET_SHARE * config.engine.max_num_seqs)
    limits = {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas}
    return {"autoscaling_config": {**limits, "target_ongoing_requests": target}}


def resources(config: ServerConfig, settings: RayConfig) -> dict[str, Any]:
    """Ray Serve's settings of the resources of a replica, with a bundle for each rank if there are several.

    On a cluster with accelerators there is one for each device of the engine, and each rank has equally many.
    """
    import ray

    there = ray.cluster_resources() if ray.is_initialized() else {}
    num_devices = (config.engine.tensor_parallel_size or 1) * config.engine.pipeline_parallel_size
    bundle = {"CPU": settings.replica_cpus}
    accelerator = next((kind for kind in ("TPU", "GPU") if there.get(kind)), None)
    if accelerator is not None:
        bundle[accelerator] = max(1, num_devices // config.nnodes)
    options: dict[str, Any] = {"ray_actor_options": actor_options(bundle)}
    if config.nnodes > 1:
        options |= {
            "placement_group_bundles": [bundle] * config.nnodes,
            "placement_group_strategy": "PACK",
        }
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, the end of the application (`serve shutdown`), or its failure.

    Args:
        argv: the flags; None for those of this process.

    Returns:
        0 after SIGINT, SIGTERM or the end of the application, 1 if it failed, 2 if a setting is wrong.
    """
    with lasting_output():
        try:
            config, settings = read_settings(argv)
            install_handler(config.log_format)
            config = _checked(config)
            return _run(config, settings)
        except ConfigError as error:
            print(f"error: {flag_message(error)}", file=sys.stderr)
            return EXIT_CONFIG


def _checked(config: ServerConfig) -> ServerConfig:
    """The settings with the commit of a model of the Hub. Replicas may run on other hosts, with their own caches."""
    found = downloaded(config)
    check_texts(found)
    engine = dataclasses.replace(config.engine, revision=found.engine.revision)
    return dataclasses.replace(config, engine=engine)


def _run(config: ServerConfig, settings: RayConfig) -> int:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve is not installed ({error}); run: pip install 'orca-jax[ray]'"
        ) from None
    _connect(config, settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    is_own = settings.ray_address is None
    try:
        serve.start(http_options=_http_options(config))
        serve.run(application(config, settings), name=APPLICATION)
        print(
            announcement(config, url_at(config, config.host, config.port) + config.root_path, None),
            flush=True,
        )
        while APPLICATION in serve.status().applications:
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        logger.info("stopping the replicas")
    except RuntimeError as error:  # no replica starts; the log has the reason
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ENGINE_DIED
    finally:
        serve.delete(APPLICATION)  # open calls end, and the proxy still carries their answers
        if is_own:
            serve.shutdown()
        ray.shutdown()
    return 0


def _interrupt(number: int, frame: object) -> None:
    """Begin to stop at the first signal, and ignore the others: stopping takes a bounded time."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _connect(config: ServerConfig, settings: RayConfig) -> None:
    """Connect to the cluster, or start one with enough processors for all replicas. Raises ConfigError."""
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.WARNING}
    if settings.ray_address is None:
        most = (settings.max_replicas or settings.replicas) * settings.replica_cpus * config.nnodes
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(most)),
            include_dashboard=False,
            **quiet,
        )
        return
    try:
        ray.init(address=settings.ray_address, **quiet)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {settings.ray_address}: {error}", param="ray_address"
        ) from None


def _http_options(config: ServerConfig) -> dict[str, Any]:
    names = ("host", "port", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


if __name__ == "__main__":
    sys.exit(run_program("python -m orca_jax.tools.deploy.ray_serve", main))
