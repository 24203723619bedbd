"""Settings of replicas in Ray Serve; none of these tests needs Ray."""

import asyncio
import builtins
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orca_jax.tools.deploy import gang, ray_serve
from orca_jax.tools.deploy.ray_serve import RayConfig, main, read_settings, resources, scaling
from orca_jax.values.errors import ConfigError, EngineDeadError


def test_flags_of_server_and_replicas() -> None:
    flags = "--model preset:toy --port 81 --replicas 2 --max-replicas 5 --routing session"
    config, settings = read_settings(flags.split())
    assert (config.engine.model, config.port) == ("preset:toy", 81)
    assert settings == RayConfig(replicas=2, max_replicas=5, routing="session")


def test_a_file_holds_both(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text("model: preset:toy\nreplicas: 3\nlog-requests: false\n", encoding="utf-8")
    config, settings = read_settings(["--config", str(path), "--replica-cpus", "2"])
    assert settings == RayConfig(replicas=3, replica_cpus=2.0) and not config.log_requests
    path.write_text("replica: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean replicas"):
        read_settings(["--config", str(path)])


def test_arguments_of_serve_run_are_flags() -> None:
    values = {
        "model": "preset:toy",
        "replicas": "2",
        "log_requests": False,
        "served_model_name": ["a", "b"],
    }
    config, settings = read_settings([], values)
    assert (config.names, config.log_requests, settings.replicas) == (("a", "b"), False, 2)


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ("--replicas 0", "replicas"),
        ("--replicas 3 --max-replicas 2", "max_replicas"),
        ("--target-ongoing-requests 4", "target_ongoing_requests"),
        ("--max-replicas 4 --target-ongoing-requests 0", "target_ongoing_requests"),
        ("--replica-cpus -1", "replica_cpus"),
        ("--uds x.sock", "uds"),
        ("--write-timeout 3", "write_timeout"),
        ("--kv-events-endpoint ipc://x", "kv_events_endpoint"),
        ("--nnodes 2 --node-rank 1", "node_rank"),
        ("--nnodes 2 --master-addr 10.0.0.1", "master_addr"),
        ("--nnodes 2 --master-port 4000", "master_port"),
        ("--nnodes 2 --cluster-key-file x.key", "cluster_key_file"),
        ("--nnodes 2 --replica-cpus 0", "replica_cpus"),
        ("--nnodes 2 --restart-engine", "restart_engine"),
        ("--trace-file t.jsonl --replicas 2", "trace_file"),
        ("--port -1", "port"),
    ],
)
def test_settings_that_cannot_work(
    flags: str, param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(flags.split())
    assert caught.value.param == param
    assert main(flags.split()) == 2
    assert f"--{param.replace('_', '-')}" in capsys.readouterr().err


def test_replicas_follow_the_calls_only_between_limits() -> None:
    def of(flags: str) -> dict[str, Any]:
        return scaling(*read_settings(flags.split()))

    assert of("--replicas 3") == {"num_replicas": 3}
    limits = {"min_replicas": 1, "max_replicas": 4}
    assert of("--max-replicas 4 --max-num-seqs 8") == {
        "autoscaling_config": {**limits, "target_ongoing_requests": 6.0}
    }
    target = of("--max-replicas 4 --target-ongoing-requests 2.5")["autoscaling_config"][
        "target_ongoing_requests"
    ]
    assert target == 2.5


@pytest.mark.parametrize(
    ("flags", "devices", "replica", "bundle"),
    [
        ("-tp 2 -pp 2", {"GPU": 8}, {"num_cpus": 1, "num_gpus": 4, "resources": {}}, None),
        (
            "-tp 2 -pp 2 --nnodes 2",
            {"GPU": 8},
            {"num_cpus": 1, "num_gpus": 2, "resources": {}},
            {"CPU": 1, "GPU": 2},
        ),
        (
            "-tp 8 --nnodes 2",
            {"TPU": 8},
            {"num_cpus": 1, "num_gpus": 0, "resources": {"TPU": 4}},
            {"CPU": 1, "TPU": 4},
        ),
        (
            "--nnodes 3 --replica-cpus 2",
            {},
            {"num_cpus": 2, "num_gpus": 0, "resources": {}},
            {"CPU": 2},
        ),
    ],
)
def test_each_rank_has_its_share_of_the_devices(
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    devices: dict[str, float],
    replica: dict[str, Any],
    bundle: dict[str, float] | None,
) -> None:
    ray = SimpleNamespace(
        is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 8, **devices}
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    config, settings = read_settings(flags.split())
    found = resources(config, settings)
    assert found["ray_actor_options"] == replica
    assert found.get("placement_group_bundles") == (
        None if bundle is None else [bundle] * config.nnodes
    )


def test_a_rank_that_ends_during_the_start_ends_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader's own reason is preferred, since it names the cause."""

    async def end(error: Exception | None, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        if error is not None:
            raise error

    async def of(leader: float, *ranks: float) -> None:
        ends = [end(ValueError("out of memory"), after) for after in ranks]
        await gang.started(end(ConfigError("no such model") if leader < 5 else None, leader), ends)

    with (
        monkeypatch.context() as patched,
        pytest.raises(EngineDeadError, match=r"rank 2 .* ended: out of memory"),
    ):
        patched.setattr(gang, "CAUSE_SECONDS", 0.02)
        asyncio.run(of(60, 60, 0))
    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(of(0.001, 0, 60))
    assert asyncio.run(gang.started(asyncio.sleep(0, "ready"), [end(None, 60)])) == "ready"


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr(ray_serve, "install_handler", lambda config: None)
    assert main(["--model", "preset:toy"]) == 2
    assert "pip install 'orca-jax[ray]'" in capsys.readouterr().err


def test_words_of_serve_run_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ray_serve, "application", lambda *settings: seen.append(settings))
    ray_serve.app(
        {"model": "preset:toy", "replicas": "2", "log_requests": "false", "max_num_seqs": 8}
    )
    ((config, settings),) = seen
    assert (config.log_requests, config.engine.max_num_seqs, settings.replicas) == (False, 8, 2)
