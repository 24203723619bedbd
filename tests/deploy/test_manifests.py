"""The manifests of deploy/kubernetes fit the server: their flags parse, and their probes ask open routes."""

import dataclasses
import re
from functools import cache
from typing import Any

import pytest
import yaml

from orca_jax.serve.args import parse_args
from orca_jax.server_config import ServerConfig
from orca_jax.tools.deploy.ray_serve import RayConfig
from orca_jax.values.config import EngineConfig
from tests.project.source import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
END_SECONDS = 15  # of a server after --shutdown-timeout, by docs/operations.md
PROBES = {"startup": "/health", "readiness": "/health", "liveness": "/live"}
SET_BY_LWS = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "orca-jax-0.orca-jax.default",
}
FLAGS = {field.name for kind in (ServerConfig, EngineConfig) for field in dataclasses.fields(kind)}


@cache
def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def parsed(container: dict[str, Any], **variables: str) -> ServerConfig:
    """The settings of a container, whose variables Kubernetes replaces."""
    assert container["command"] == ["python", "-m", "orca_jax.serve"]
    return parse_args(
        [
            re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], flag)
            for flag in container["args"]
        ]
    )


def check_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """Check a pod with a server; return its container."""
    (container,) = pod["containers"]
    assert {name: container[f"{name}Probe"]["httpGet"]["path"] for name in PROBES} == PROBES
    first = pod.get("initContainers", [])
    mounted = {mount["name"] for one in (container, *first) for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert (
        pod["securityContext"]["runAsNonRoot"]
        and container["securityContext"]["readOnlyRootFilesystem"]
    )
    written = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"name": written["/tmp"], "emptyDir": {}} in pod["volumes"]
    assert isinstance(container, dict)
    return container


def patched(deployment: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """A deployment after a JSON patch of additions."""
    result: dict[str, Any] = yaml.safe_load(yaml.safe_dump(deployment))
    for operation in operations:
        assert operation["op"] == "add"
        *parents, last = operation["path"].strip("/").split("/")
        target: Any = result
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target[name]
        if last == "-":
            target.append(operation["value"])
        else:
            target[last] = operation["value"]
    return result


def test_a_server_with_its_pool() -> None:
    deployment, service, pool = documents("orca-jax.yaml")
    template = deployment["spec"]["template"]
    container = check_pod(template["spec"])
    config = parsed(container)
    assert (
        template["spec"]["terminationGracePeriodSeconds"] >= config.shutdown_timeout + END_SECONDS
    )
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"] == selector
    assert selector.items() <= template["metadata"]["labels"].items()
    assert (
        pool["spec"]["targetPorts"]
        == [{"number": config.port}]
        == [{"number": container["ports"][0]["containerPort"]}]
    )


@pytest.mark.parametrize(
    ("name", "resource", "number"),
    [("gke-gpu.yaml", "nvidia.com/gpu", 1), ("gke-tpu.yaml", "google.com/tpu", 4)],
)
def test_devices_of_gke(name: str, resource: str, number: int) -> None:
    """The server uses as many devices as the pod has; a limit of devices must equal the request, if there is one."""
    deployment, *_ = documents("orca-jax.yaml")
    (operations,) = documents(name)
    pod = patched(deployment, operations)["spec"]["template"]["spec"]
    container = check_pod(pod)
    resources = container["resources"]
    assert (
        resources["limits"] == {resource: number}
        and resources["requests"].get(resource, number) == number
    )
    assert (parsed(container).engine.tensor_parallel_size or 1) == number
    assert all(key.startswith("cloud.google.com/gke-") for key in pod["nodeSelector"])


def test_programs_are_kept_where_the_image_keeps_them() -> None:
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")]
    assert set(re.findall(r"--compile-cache=([\w/]+)", "".join([image, *texts]))) == {
        "/cache/programs"
    }


def test_events_of_the_prefix_cache() -> None:
    """The patch makes a server whose events only the picker can read."""
    deployment, *_ = documents("orca-jax.yaml")
    (operations,) = documents("kv-events.yaml")
    (policy,) = documents("kv-events-policy.yaml")
    pod = patched(deployment, operations)["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    config = parsed(container, **{one["name"]: "10.0.0.7" for one in container["env"]})
    events = config.kv_events
    assert events is not None and events.topic == f"kv@10.0.0.7:{config.port}@{config.names[0]}"
    ports = {
        int(address.rpartition(":")[2])
        for address in (events.endpoint, events.replay_endpoint or "")
    }
    everyone, picker = policy["spec"]["ingress"]
    assert {one["port"] for one in everyone["ports"]} == {config.port} and "from" not in everyone
    assert {one["port"] for one in picker["ports"]} == ports and picker["from"]
    assert {one["containerPort"] for one in container["ports"]} == ports | {config.port}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_a_server_over_several_hosts() -> None:
    group, service = documents("several-hosts.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    container = check_pod(leader["spec"])
    config = parsed(container, **SET_BY_LWS)
    (other,) = worker["spec"]["containers"]
    assert parsed(other, **SET_BY_LWS) == config
    assert config.cluster_key_file == leader["spec"]["initContainers"][0]["command"][-1]
    assert leader["spec"]["terminationGracePeriodSeconds"] >= config.shutdown_timeout + END_SECONDS
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    selector = service["spec"]["selector"].items()
    assert (
        selector <= leader["metadata"]["labels"].items()
        and not selector <= worker["metadata"]["labels"].items()
    )
    *_, pool = documents("orca-jax.yaml")
    assert pool["spec"]["selector"]["matchLabels"].items() == selector


def test_a_tpu_slice_of_gke() -> None:
    """Each host has all of its chips, and together they are the mesh."""
    group, _ = documents("several-hosts.yaml")
    (operations,) = documents("gke-tpu-hosts.yaml")
    template = patched(group, operations)["spec"]["leaderWorkerTemplate"]
    variables = SET_BY_LWS | {"LWS_GROUP_SIZE": str(template["size"])}
    columns, rows = template["leaderTemplate"]["spec"]["nodeSelector"][
        "cloud.google.com/gke-tpu-topology"
    ].split("x")
    for part in ("leaderTemplate", "workerTemplate"):
        pod = template[part]["spec"]
        assert pod["nodeSelector"] == template["leaderTemplate"]["spec"]["nodeSelector"]
        (container,) = pod["containers"]
        config = parsed(container, **variables)
        chips = container["resources"]["limits"]["google.com/tpu"]
        assert container["resources"]["requests"]["google.com/tpu"] == chips
        num_chips = chips * template["size"]
        assert num_chips == int(columns) * int(rows) == config.engine.tensor_parallel_size
        assert config.nnodes == template["size"]


def test_a_jobset_has_the_settings_of_several_hosts() -> None:
    """Each pod is a host of the slice; the service selects the leader, the pod with index 0."""
    jobs, service = documents("jobset.yaml")
    (job,) = jobs["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    hosts = [
        parsed(container, JOB_COMPLETION_INDEX=str(rank)) for rank in range(spec["completions"])
    ]
    assert spec["parallelism"] == spec["completions"] == hosts[0].nnodes
    assert [config.node_rank for config in hosts] == [*range(hosts[0].nnodes)]
    leader = f"{jobs['metadata']['name']}-{job['name']}-0-0.{jobs['metadata']['name']}"
    assert hosts[0].master_addr == leader
    chips = container["resources"]["limits"]["google.com/tpu"]
    columns, rows = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert chips * hosts[0].nnodes == int(columns) * int(rows)
    assert hosts[0].engine.tensor_parallel_size == chips * hosts[0].nnodes
    assert service["spec"]["selector"] == {
        "jobset.sigs.k8s.io/jobset-name": jobs["metadata"]["name"],
        "batch.kubernetes.io/job-completion-index": "0",
    }
    group, _ = documents("several-hosts.yaml")
    other = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    for part in ("volumes", "initContainers", "securityContext", "terminationGracePeriodSeconds"):
        assert pod[part] == other[part]
    (server,) = other["containers"]
    for part in ("securityContext", "volumeMounts", "ports", "command"):
        assert container[part] == server[part]


def test_the_picker_has_the_label_of_its_chart() -> None:
    """The chart llm-d-router-gateway labels the pods of a release NAME so; the pool names its service."""
    *_, pool = documents("orca-jax.yaml")
    (policy,) = documents("kv-events-policy.yaml")
    picker = pool["spec"]["endpointPickerRef"]["name"]
    (source,) = policy["spec"]["ingress"][1]["from"]
    assert source["podSelector"]["matchLabels"] == {"llm-d-router-gateway": picker}


def test_flags_of_the_page_exist() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    of_replicas = {field.name for field in dataclasses.fields(RayConfig)}
    named = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)}
    others = {"gpus", "device", "privileged", "build_arg", "tmpfs"}  # of docker
    assert named - others <= FLAGS | of_replicas
    assert of_replicas - {"replica_cpus"} <= named
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"deploy/[\w./-]+", text):
        assert (ROOT / path.rstrip(".")).exists(), path
