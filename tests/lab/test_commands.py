"""The commands of `python -m lab`, and the earlier names of some of them among the benchmarks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.__main__ import COMMANDS, main, make_parser
from orca_jax.tools.bench.__main__ import GONE, MOVED
from orca_jax.tools.bench.__main__ import main as bench
from tests.project.source import ROOT

ARRAYS = {"jax", "numpy", "flax", "orbax", "matplotlib"}
HELP = """
import contextlib, io, json, sys
from lab.__main__ import main
for name in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([name, "--help"])
    print(json.dumps([name, sorted(sys.modules)]))
"""


@pytest.mark.parametrize("name", MOVED)
def test_an_earlier_benchmark_names_its_place(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        bench(["schedulers", f"{name}=10"] if name.startswith("-") else [name, "--any", "flag"])
        == 2
    )
    shown = capsys.readouterr().err
    assert f"`python -m lab {MOVED[name]}`, in a clone" in shown and shown.count("\n") == 1
    assert MOVED[name] in COMMANDS


@pytest.mark.parametrize("name", GONE)
def test_a_benchmark_that_has_ended_names_its_result(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench([name]) == 2
    assert "docs/benchmarks.md" in capsys.readouterr().err and name not in COMMANDS


def test_flags_of_a_server_are_not_those_of_a_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["start", "--repeat", "0", "--", "--profile"]) == 2
    assert "repeat must be" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--helpp"])
    shown = capsys.readouterr().err
    assert caught.value.code == 2
    assert shown.count("\n") == 1 and re.search(r"did you mean|--help lists the flags", shown)


def test_every_command_with_flags_of_an_engine_takes_a_file() -> None:
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    assert commands.choices and set(commands.choices) == set(COMMANDS)
    for parser in commands.choices.values():  # type: ignore[union-attr]
        flags = parser._option_string_actions
        assert "--config" in flags or "--kv-cache-dtype" not in flags, parser.prog


def test_help_of_earlier_benchmarks_imports_no_arrays() -> None:
    names = [MOVED[name] for name in MOVED if name != "paper" and not name.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name, modules in map(json.loads, done.stdout.splitlines()):
        assert not ARRAYS.intersection(modules), (
            f"python -m lab {name} --help imports {ARRAYS.intersection(modules)}"
        )


def test_the_exit_status_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.pages.command.run", lambda args: 1)
    assert main(["pages"]) == 1
    monkeypatch.setattr("lab.pages.command.run", lambda args: None)
    assert main(["pages"]) == 0


def test_a_file_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", "--save", str(tmp_path / "none" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
