"""Plans for published deployments: the printed command starts, on as many devices and hosts as were published."""

from dataclasses import replace

import pytest

from lab.pages.deployments import DEPLOYMENTS, Deployment, chosen, model_of
from orca_jax.assembly.devices import devices_each
from orca_jax.assembly.support import Facts, check_settings, check_support
from orca_jax.serve.args import parse_args
from orca_jax.tools.plan.accelerators import parse_devices
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named


def name_of(deployment: Deployment) -> str:
    return f"{deployment.model} {deployment.devices}"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=name_of)
def test_what_a_plan_prints_is_what_starts(deployment: Deployment) -> None:
    """The engine takes the flags with the planned hosts and chips, and no other number of devices."""
    option = chosen(deployment)
    split = option.memory.split
    assert (split.tensor, split.stages) == (deployment.tensor, 1)
    assert (option.nodes, option.replicas) == (deployment.hosts, 1)
    others = ["--master-addr", "10.0.0.1"] if deployment.hosts > 1 else []
    config = parse_args(["--model", "preset:llama-3-70b", *option.flags(), *others])
    assert max(config.nnodes, 1) == deployment.hosts
    check_settings(config.engine)
    kind = parse_devices(deployment.devices).kind
    each = deployment.tensor // deployment.hosts
    facts = Facts(
        config.engine,
        num_hosts=deployment.hosts,
        model=model_of(deployment),
        platform=kind.platform,
        dtype="bfloat16",
        shards=deployment.tensor,
        num_devices=each,
        device_kind=kind.device_kind,
    )
    assert devices_each(facts, each) == each
    check_support(facts, "model", "platform")
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        devices_each(replace(facts, num_devices=each // 2), each // 2)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=name_of)
def test_the_planned_requests_fit_into_the_memory(deployment: Deployment) -> None:
    option = chosen(deployment)
    kind = parse_devices(deployment.devices).kind
    assert not platform_named(kind.platform).is_host
    (stage,) = option.memory.stages
    assert stage.weights + stage.workspace + stage.cache <= 0.9 * kind.memory
    assert option.memory.cache_tokens >= option.memory.rows * option.memory.context
    assert option.times is not None and option.times.token_seconds < 0.1
