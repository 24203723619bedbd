"""Runs the steps of deploy/Dockerfile without a container engine: builds, starts and checks a target.

    sudo python -m lab.measured.image_steps --target cpu

The root file system of this machine stands in for the base image: each stage is a layer over it (overlayfs). All mounts
are in the namespace of a child process and end with it, so the machine does not change, and the folder of the layers
holds plain files when it is removed. The entry point runs as the user of the image, with the environment of the image
alone, on a read-only root, and with a network of its own. Needs Linux and root.
"""

import argparse
import fcntl
import glob
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
# variables of the network, for the RUN steps
PASSED = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEVICES = ("null", "zero", "random", "urandom")
SECONDS = 900  # until the container is healthy
END_SECONDS = 60


class Step(NamedTuple):
    """An instruction of a Dockerfile, with its lines joined."""

    name: str
    text: str


@dataclass
class Stage:
    """A stage. `base` is another stage, or an image."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)

    def of(self, name: str) -> list[str]:
        """The texts of the instructions of a kind."""
        return [step.text for step in self.steps if step.name == name]


def steps_of(text: str) -> Iterator[Step]:
    """The instructions of a Dockerfile."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield Step(name, " ".join(rest.split()))


def stages_of(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name, in order. Arguments before the first stage have their defaults."""
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for step in steps_of(text):
        if step.name == "FROM":
            base, _, name = step.text.partition(" AS ")
            for argument, default in arguments.items():
                base = base.replace(f"${{{argument}}}", default)
            stages[name] = Stage(name, base)
        elif stages:
            stages[next(reversed(stages))].steps.append(step)
        else:
            name, _, default = step.text.partition("=")
            arguments[name] = default
    return stages


def settings_of(stages: dict[str, Stage], target: str) -> dict[str, list[str]]:
    """The instructions about the running container, of a stage and the stages below it."""
    below = settings_of(stages, stages[target].base) if stages[target].base in stages else {}
    kinds = ("ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT")
    return {kind: [*below.get(kind, []), *stages[target].of(kind)] for kind in kinds}


class Builder:
    """Builds stages as layers over the root file system of this machine.

    Args:
        stages: of the Dockerfile.
        folder: for the layers.
    """

    def __init__(self, stages: dict[str, Stage], folder: Path) -> None:
        self._stages = stages
        self._folder = folder
        self.roots: dict[str, Path] = {}
        self.seconds: dict[str, float] = {}

    def build(self, name: str) -> Path:
        """Build a stage and those that it needs. Returns the root of its file system."""
        if name in self.roots:
            return self.roots[name]
        stage = self._stages[name]
        lower = self.build(stage.base) if stage.base in self._stages else Path("/")
        root, upper, work = (self._folder / name / part for part in ("root", "layer", "work"))
        for part in (root, upper, work):
            part.mkdir(parents=True)
        mount(
            "-t",
            "overlay",
            "-o",
            f"lowerdir={lower},upperdir={upper},workdir={work}",
            "overlay",
            root,
        )
        mount("-t", "proc", "proc", root / "proc")
        for place in ("dev", "tmp"):
            mount("-t", "tmpfs", "tmpfs", root / place)
        for device in DEVICES:
            (root / "dev" / device).touch()
            mount("--bind", f"/dev/{device}", root / "dev" / device)
        for number, stream in enumerate(("stdin", "stdout", "stderr")):
            (root / "dev" / stream).symlink_to(f"/proc/self/fd/{number}")
        (root / "dev" / "fd").symlink_to("/proc/self/fd")
        (root / "dev" / "shm").mkdir(mode=0o1777)
        if lower == Path("/"):
            stand_in(root)
        self.roots[name] = root
        folder = "/"
        variables = {"PATH": PATH, "HOME": "/root"}
        for step in stage.steps:
            if step.text.startswith("--from="):
                self.build(step.text.partition("=")[2].split()[0])
            begun = time.monotonic()
            if step.name == "WORKDIR":
                folder = step.text
                (root / folder.strip("/")).mkdir(parents=True, exist_ok=True)
            elif step.name == "ARG":
                argument, _, default = step.text.partition("=")
                variables[argument] = default.strip('"')
            elif step.name == "COPY":
                self._copy(root, folder, step.text.split())
            elif step.name == "RUN":
                passed = {
                    name: value
                    for name, value in os.environ.items()
                    if name.upper().startswith(PASSED)
                }
                command = inside(root, folder, {**passed, **variables}, ["sh", "-c", step.text])
                done = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise SystemExit(
                        f"error: RUN {step.text} ended with status {done.returncode}:\n{done.stdout}"
                    )
            if step.name in ("COPY", "RUN"):
                key = f"{name}: {step.name} {step.text}"
                self.seconds[key] = time.monotonic() - begun
                print(f"{self.seconds[key]:7.1f} s  {key[:110]}", flush=True)
        return root

    def _copy(self, root: Path, folder: str, words: list[str]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = self.build(words.pop(0).removeprefix("--from="))
        *patterns, last = words
        target = root / os.path.normpath(os.path.join(folder, last)).strip("/")
        for pattern in patterns:
            (*found,) = map(Path, glob.glob(str(source / pattern.strip("/"))))
            if not found:
                raise SystemExit(f"error: COPY {pattern}: there is no such file")
            for path in found:
                if path.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__") if source == ROOT else None
                    shutil.copytree(path, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)
                else:
                    place = target / path.name if last.endswith("/") else target
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, place)

    def size(self, name: str) -> int:
        """Bytes of the layers of a stage, without the base image."""
        files = (self._folder / name / "layer").rglob("*")
        own = sum(
            path.lstat().st_size for path in files if path.is_file() and not path.is_symlink()
        )
        base = self._stages[name].base
        return own + (self.size(base) if base in self._stages else 0)


def stand_in(root: Path) -> None:
    """Let this Python be the `python` of the base image, for all users."""
    place = root / "usr" / "local" / "bin"
    place.mkdir(parents=True, exist_ok=True)
    here = Path(sys.base_prefix).resolve()
    for name, target in (
        ("python", f"python{sys.version_info.major}.{sys.version_info.minor}"),
        ("pip", "pip3"),
    ):
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(here / "bin" / target)
    for folder in here.parents:
        inner = root / folder.relative_to("/")
        inner.chmod(inner.stat().st_mode | 0o011)


def mount(*words: object) -> None:
    """Mount by the command of the system."""
    subprocess.run(["mount", *map(str, words)], check=True)


def inside(
    root: Path,
    folder: str,
    variables: dict[str, str],
    command: Sequence[str],
    user: str | None = None,
) -> list[str]:
    """Return the command that runs `command` in a root, with these variables alone."""
    change = ["chroot", *([f"--userspec={user}:{user}"] if user else []), str(root)]
    values = [f"{name}={value}" for name, value in variables.items()]
    return [
        *change,
        "/usr/bin/env",
        "-i",
        *values,
        "sh",
        "-c",
        f'cd {folder} && exec "$@"',
        "sh",
        *command,
    ]


def start(root: Path, settings: dict[str, list[str]]) -> dict[str, object]:
    """Start the entry point, wait for the health check, generate a token, and end it. Returns what was measured."""
    (user,), (folder,), (volume,) = settings["USER"], settings["WORKDIR"], settings["VOLUME"]
    variables = {"PATH": PATH, "HOME": folder}
    for pair in " ".join(settings["ENV"]).split():
        name, _, value = pair.partition("=")
        variables[name] = value.replace("$PATH", PATH)
    subprocess.run(["umount", str(root / "tmp")], check=True)
    mount("-o", "remount,ro", root)
    mount(
        "-t", "tmpfs", "-o", f"uid={user},gid={user},mode=0700", "tmpfs", root / volume.strip("/")
    )
    own_network()
    entry = json.loads(settings["ENTRYPOINT"][-1])
    check = json.loads(settings["HEALTHCHECK"][-1].partition("CMD ")[2])
    begun = time.monotonic()
    process = subprocess.Popen(inside(root, folder, variables, entry, user), start_new_session=True)
    try:
        while subprocess.run(
            inside(root, folder, variables, check, user), capture_output=True
        ).returncode:
            if process.poll() is not None or time.monotonic() - begun > SECONDS:
                raise SystemExit(
                    f"error: the container is not healthy; exit status {process.poll()}"
                )
            time.sleep(1)
        healthy = time.monotonic() - begun
        text = first_token(int(settings["EXPOSE"][-1]))
        token = time.monotonic() - begun
        written = subprocess.run(
            inside(root, "/", variables, ["touch", "/usr/x"], user), capture_output=True
        )
        process.terminate()
        status = process.wait(END_SECONDS)
    finally:
        process.kill()
    found = {
        "healthy_s": healthy,
        "first_token_s": token,
        "text": text,
        "exit_status": status,
        "user": user,
    }
    return {**found, "read_only": written.returncode != 0}


def own_network() -> None:
    """Give this process a network with a loopback device alone, so that the ports of the image are free."""
    os.unshare(os.CLONE_NEWNET)
    up, set_flags = 0x1, 0x8914  # IFF_UP, SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up))


def first_token(port: int) -> str:
    """Generate a token over HTTP."""
    body = json.dumps({"prompt": "The sea was", "max_tokens": 1}).encode()
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urlopen(request, timeout=60) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text
    except URLError as error:
        raise SystemExit(f"error: the container does not answer: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Build and start a target. Returns 1 if it is not as the file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="cpu", help="stage to build (default: cpu)")
    parser.add_argument("--build-only", action="store_true", help="do not start the entry point")
    args = parser.parse_args(argv)
    stages = stages_of(DOCKERFILE.read_text(encoding="utf-8"))
    if args.target not in stages:
        parser.error(f"there is no target {args.target!r}; the targets are {', '.join(stages)}")
    if sys.platform != "linux" or os.geteuid() != 0:
        parser.error("this needs Linux and root, for layers and a network of its own")
    with tempfile.TemporaryDirectory(prefix="orca-jax-image-") as folder:
        child = os.fork()
        if child == 0:
            try:
                status = run(stages, args.target, Path(folder), is_started=not args.build_only)
            except BaseException as error:
                print(error, file=sys.stderr)
                status = 1
            sys.stdout.flush()
            os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(stages: dict[str, Stage], target: str, folder: Path, *, is_started: bool) -> int:
    """Build a target and start it, in namespaces of this process. Returns the exit status of `main`."""
    os.unshare(os.CLONE_NEWNS)
    mount("--make-rprivate", "/")
    builder = Builder(stages, folder)
    root = builder.build(target)
    found: dict[str, object] = {"target": target, "bytes": builder.size(target)}
    found["steps_s"] = {key: round(seconds, 1) for key, seconds in builder.seconds.items()}
    if is_started:
        found |= start(root, settings_of(stages, target))
    print(json.dumps(found))
    return 0 if not is_started or (found["read_only"] and found["exit_status"] == 0) else 1


if __name__ == "__main__":
    sys.exit(main())
