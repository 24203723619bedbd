"""deploy/Dockerfile builds what there is: sources, extras, flags and routes exist."""

import fnmatch
import json
import re
import tomllib
from collections.abc import Iterator

from orca_jax.serve.access import OPEN_PATHS
from orca_jax.serve.args import parse_args
from orca_jax.server_config import ServerConfig
from tests.project.source import ROOT

TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> Iterator[tuple[str, str]]:
    """(name, the rest) of each instruction, with its lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, " ".join(rest.split())


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def sources() -> set[str]:
    """The paths that are copied from the repository."""
    return {path for rest in of("COPY") if not rest.startswith("--from") for path in rest.split()[:-1]}


def test_what_is_copied_exists_and_suffices() -> None:
    assert all((ROOT / path).exists() for path in sources())
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["readme"], *project["license-files"], "pyproject.toml", *wheel["only-include"]}
    assert not {path for path in needed if not any(path == one or path.startswith(f"{one}/") for one in sources())}


def test_what_is_copied_is_not_ignored() -> None:
    rules = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    assert sources() == {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert "*" in rules and not any(fnmatch.fnmatch(path, "**/__pycache__") for path in sources())


def test_extras_exist() -> None:
    named = re.findall(r"EXTRA=(\w[\w,]*)", TEXT) + re.findall(r"such as ([\w,]+)", TEXT)
    extras = {extra for names in named for extra in names.strip(",").split(",")}
    assert {"cuda", "tpu"} <= extras <= set(PROJECT["project"]["optional-dependencies"])


def test_flags_parse() -> None:
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    program, flags = json.loads(entry), json.loads(command)
    assert program[:3] == ["python", "-m", "orca_jax.serve"]
    config = parse_args([*program[3:], *flags])
    assert (config.host, config.engine.model) == ("0.0.0.0", "demo")
    assert of("EXPOSE") == [str(config.port)]
    assert config.engine.compile_cache in of("VOLUME")


def test_it_runs_as_its_own_user() -> None:
    (user,) = of("USER")
    assert user.isdecimal() and int(user) > 0, "Kubernetes checks runAsNonRoot by the number"
    assert f"--uid {user}" in TEXT
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_the_health_check_asks_an_open_route() -> None:
    (check,) = of("HEALTHCHECK")
    program = json.loads(check.partition("CMD ")[2])
    compile(program[2], "HEALTHCHECK", "exec")
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", program[2]).groups()  # type: ignore[union-attr]
    assert int(port) == ServerConfig().port
    assert path in OPEN_PATHS
