"""The command `orca-jax`: its subcommands, their help, and errors of one line."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import orca_jax
from orca_jax.cli import main as command
from orca_jax.cli.main import GROUPS, SUBCOMMANDS, main
from orca_jax.flags import program, run_program
from orca_jax.tools.bench.__main__ import COMMANDS
from orca_jax.values.errors import ConfigError, EngineError, RequestError
from tests.cli.imports import imports_of
from tests.project.source import ROOT

ARRAYS = ("jax", "numpy", "flax", "orbax", "matplotlib")
ENGINE = (*ARRAYS, "tokenizers", "uvicorn", "starlette", "httpx", "yaml")
MOST_MODULES = 280  # Python itself and argparse are some 100


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and found.help in shown for name, found in SUBCOMMANDS.items())
    assert all(f"{title}:" in shown for title in GROUPS)
    assert main([]) == 2
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_a_short_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ") and len(shown.splitlines()) < 90


def test_the_version_of_the_package_is_that_of_its_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert orca_jax.__version__ == project["version"]
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        orca_jax.version  # noqa: B018


def test_help_imports_no_engine() -> None:
    """Help takes no longer than the imports: `python -m lab.measured.help_times` prints the seconds."""
    commands = [["--help"], ["--version"], ["sreve"], *([name, "--help"] for name in SUBCOMMANDS)]
    for words, modules in imports_of(*commands).items():
        found = modules.intersection(ENGINE)
        assert not found, f"orca-jax {words} imports {found}"
        assert len(modules) < MOST_MODULES, f"orca-jax {words} imports {len(modules)} modules"


def test_help_of_benchmarks_imports_no_arrays() -> None:
    for words, modules in imports_of(*(["bench", name, "--help"] for name in COMMANDS)).items():
        assert not modules.intersection(ARRAYS), (
            f"orca-jax {words} imports {modules.intersection(ARRAYS)}"
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sreve"], "there is no subcommand 'sreve'; did you mean serve?"),
        (["xyz"], f"there is no subcommand 'xyz'; the subcommands are {', '.join(SUBCOMMANDS)}"),
        (
            ["--model", "demo"],
            f"unknown flag --model; a subcommand comes first: {', '.join(SUBCOMMANDS)}",
        ),
    ],
)
def test_unknown_subcommands(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            ConfigError("must be above 0", param="max_num_seqs"),
            2,
            "--max-num-seqs: must be above 0",
        ),
        (RequestError("n must be 1", param="n"), 2, "n must be 1"),
        (EngineError("the engine is gone"), 1, "the engine is gone"),
        (
            FileNotFoundError(2, "No such file or directory", "x"),
            1,
            "x: No such file or directory; check the path",
        ),
        (
            KeyError("a\nb"),
            1,
            "unexpected KeyError: 'a\\nb'; orca-jax --debug serve ... prints the traceback",
        ),
    ],
)
def test_an_error_is_one_line_unless_debug(
    error: Exception,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(command.importlib, "import_module", lambda name: SimpleNamespace(main=fail))
    assert main(["serve"]) == status
    assert capsys.readouterr().err == f"error: {message}\n"
    assert main(["--debug", "serve"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_programs_name_the_command_that_prints_a_traceback() -> None:
    """A subcommand of `orca-jax`, or the whole command of its module."""
    for folder in ("orca_jax", "lab"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
                ".__main__"
            )
            for name in re.findall(
                r"""run_program\("([^"]+)\"""", path.read_text(encoding="utf-8")
            ):
                assert name in SUBCOMMANDS or name == f"python -m {module}", path


def test_the_hint_of_another_program_is_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(words: Sequence[str] | None) -> int:
        raise KeyError("x")

    assert run_program("python -m lab", fail, []) == 1
    assert "; python -m lab --debug ... prints the traceback" in capsys.readouterr().err


def test_ctrl_c_has_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        command.importlib, "import_module", lambda name: SimpleNamespace(main=interrupted)
    )
    assert main(["bench"]) == 130


def test_the_words_of_a_subcommand_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        command.importlib,
        "import_module",
        lambda name: SimpleNamespace(main=lambda words: seen.append(words) or 7),
    )
    assert main(["batch", "-i", "a", "--debug"]) == 7 and seen == [["-i", "a", "--debug"]]


def test_the_program_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/orca-jax", "serve"])
    assert program("serve") == "orca-jax serve"
    monkeypatch.setattr(sys, "argv", ["/x/orca_jax/serve/__main__.py"])
    assert program("serve") == "python -m orca_jax serve"


@pytest.mark.parametrize("name", sorted(set(SUBCOMMANDS) - {"completion"}))
def test_the_usage_names_a_command_that_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "orca_jax" / "__main__.py"), name, "--help"])
    with pytest.raises(SystemExit):
        main([name, "--help"])
    usages = f"usage: python -m orca_jax {name}", f"usage: orca-jax {name}"
    assert capsys.readouterr().out.startswith(usages)


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orca_jax", "plan"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage" in done.stderr or "--devices" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "words", [["--version"], ["generate", "hi", "--model", "preset:toy", "--max-tokens", "2"]]
)
def test_an_answer_that_cannot_be_written_is_a_failure(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orca_jax.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "standard output cannot be written: No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("name", "is_quiet"), [("-m", True), ("/somewhere/bin/orca-jax", True), ("script.py", False)]
)
def test_ctrl_c_during_imports_of_a_program_is_no_traceback(name: str, is_quiet: bool) -> None:
    script = (
        f"import signal, sys; sys.argv = [{name!r}]; import orca_jax; from orca_jax.flags import run_program\n"
        "print(signal.getsignal(signal.SIGINT) == signal.SIG_DFL)\n"
        "sys.exit(run_program('x', lambda words: signal.raise_signal(signal.SIGINT), []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{is_quiet}\n", "", 130)
