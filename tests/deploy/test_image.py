"""deploy/Dockerfile builds what there is: sources, extras, flags and routes exist, for each of its three targets."""

import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from lab.measured.image_steps import settings_of, stages_of
from orca_jax.helpers.bundled import chosen_model
from orca_jax.serve.access import OPEN_PATHS
from orca_jax.serve.args import parse_args
from orca_jax.server_config import ServerConfig
from tests.project.source import ROOT

TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
STAGES = stages_of(TEXT)
TARGETS = ("cpu", "cuda", "tpu")
SETTINGS = "deploy/image.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def copies(stage: str) -> list[list[str]]:
    return [text.split() for text in STAGES[stage].of("COPY")]


def sources(*stages: str) -> set[str]:
    """The paths that stages copy from the repository."""
    found = [
        words for stage in stages for words in copies(stage) if not words[0].startswith("--from")
    ]
    return {path for words in found for path in words[:-1]}


def test_the_targets_are_the_last_stages() -> None:
    """The one without a name is the last one: that for the CPU."""
    assert set(list(STAGES)[-3:]) == set(TARGETS) and list(STAGES)[-1] == "cpu"
    assert set(re.findall(r"--target (\w+)", TEXT)) == set(TARGETS)


def test_every_base_is_a_stage_or_an_image_with_a_version() -> None:
    """The wheel is made where a C compiler is, and all else is of the slim image."""
    images = {name: stage.base for name, stage in STAGES.items() if stage.base not in STAGES}
    assert re.fullmatch(r"python:3\.\d+\.\d+-bookworm", images.pop("wheel"))
    (image,) = {*images.values()}
    assert image == STAGES["wheel"].base.replace("-", "-slim-")
    version = image.partition(":")[2].rpartition(".")[0]
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


def test_what_is_copied_exists_and_suffices_for_a_wheel() -> None:
    assert all((ROOT / path).exists() for path in sources(*STAGES))
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    hook = wheel["hooks"]["custom"]["path"]
    needed = {
        project["readme"],
        *project["license-files"],
        "pyproject.toml",
        hook,
        *wheel["only-include"],
    }
    given = sources("wheel")
    assert not {
        path
        for path in needed
        if not any(path == one or path.startswith(f"{one}/") for one in given)
    }


def test_what_is_copied_is_not_ignored() -> None:
    rules = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    assert sources(*STAGES) == {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert "*" in rules and not any(
        fnmatch.fnmatch(path, "**/__pycache__") for path in sources(*STAGES)
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_holds_the_environment_of_its_extra_alone(target: str) -> None:
    """No source and no compiler: the environment is copied from another stage."""
    ((origin, source, place),) = copies(target)
    assert (origin, source) == (f"--from={target}-environment", place) and STAGES[
        target
    ].base == "runtime"
    assert not STAGES[target].of("RUN")
    (install,) = STAGES[f"{target}-environment"].of("RUN")
    extras = re.findall(r"\[(\$CUDA|\w+)\$", install)
    assert (
        extras == {"cpu": [], "cuda": ["$CUDA"], "tpu": ["tpu"]}[target]
        and {*extras} - {"$CUDA"} <= optional()
    )
    assert (
        f"{source}/bin/pip install" in install and "--constraint /wheels/constraints.txt" in install
    )
    assert source in settings_of(STAGES, target)["ENV"][0].split("PATH=")[1]


def optional() -> set[str]:
    return set(PROJECT["project"]["optional-dependencies"])


def test_further_extras_exist() -> None:
    (named,) = re.findall(r"--build-arg EXTRAS=([\w,]+)", TEXT)
    assert set(named.split(",")) <= optional()
    assert all(STAGES[f"{target}-environment"].of("ARG")[0] == 'EXTRAS=""' for target in TARGETS)


def test_the_image_for_gpus_has_cuda_13_by_default() -> None:
    """Some assemblers of CUDA 12 miscompile the kernels for Hopper. Older drivers need CUDA 12."""
    assert STAGES["cuda-environment"].of("ARG")[1] == "CUDA=cuda13"
    assert re.findall(r"--build-arg CUDA=(\w+)", TEXT) == ["cuda"]
    assert [PROJECT["project"]["optional-dependencies"][extra] for extra in ("cuda", "cuda13")] == [
        ["jax[cuda12]>=0.11.2"],
        ["jax[cuda13]>=0.11.2"],
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_the_entry_point_is_the_command(target: str) -> None:
    settings = settings_of(STAGES, target)
    program = json.loads(settings["ENTRYPOINT"][0])
    assert program[:2] == ["orca-jax", "serve"] and "orca-jax" in PROJECT["project"]["scripts"]
    assert (
        program[2:] == [f"--config={copies('runtime')[0][1]}"]
        and copies("runtime")[0][0] == SETTINGS
    )
    config = parse_args(["--config", str(ROOT / SETTINGS)])
    assert (config.host, config.engine.model) == ("0.0.0.0", chosen_model()[0])
    assert settings["EXPOSE"] == [str(config.port)]
    assert parse_args(["preset:toy", "--config", str(ROOT / SETTINGS)]).engine.model == "preset:toy"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_is_in_the_volume(target: str) -> None:
    settings = settings_of(STAGES, target)
    (volume,) = settings["VOLUME"]
    cache = parse_args(["--config", str(ROOT / SETTINGS)]).engine.compile_cache
    (downloads,) = re.findall(r"HF_HOME=(\S+)", " ".join(settings["ENV"]))
    assert cache is not None and all(place.startswith(f"{volume}/") for place in (cache, downloads))
    assert f"--owner=orca --group=orca --mode=0700 {volume}" in " ".join(
        STAGES["runtime"].of("RUN")
    )


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_its_own_user(target: str) -> None:
    (user,) = settings_of(STAGES, target)["USER"]
    assert user.isdecimal() and int(user) > 0, "Kubernetes checks runAsNonRoot by the number"
    assert f"--uid {user}" in TEXT
    names = [step.name for step in STAGES["runtime"].steps]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_the_health_check_asks_an_open_route() -> None:
    (check,) = settings_of(STAGES, "cpu")["HEALTHCHECK"]
    program = json.loads(check.partition("CMD ")[2])
    compile(program[2], "HEALTHCHECK", "exec")
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", program[2]).groups()  # type: ignore[union-attr]
    assert int(port) == ServerConfig().port
    assert path in OPEN_PATHS


def test_the_page_builds_these_targets() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"docker build -f deploy/Dockerfile --target (\w+)", page)) == set(
        TARGETS
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="layers need Linux and root"
)
def test_the_steps_of_the_image_for_the_cpu() -> None:
    """The built environment serves from a read-only root, as the user of the image."""
    command = [sys.executable, "-m", "lab.measured.image_steps", "--target", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (
        found["read_only"]
        and found["exit_status"] == 0
        and found["user"] == "10001"
        and found["text"]
    )
