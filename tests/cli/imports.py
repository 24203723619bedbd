"""The modules that a command imports."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.project.source import ROOT

PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from orca_jax.cli.main import main
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            main(words)
        except SystemExit:
            pass
    print(json.dumps([words, sorted(sys.modules)]))
"""


def imported_by(*commands: Sequence[str]) -> set[str]:
    """The modules imported by commands of `orca-jax`, one after the other in one process."""
    return list(imports_of(*commands).values())[-1]


def imports_of(*commands: Sequence[str]) -> dict[str, set[str]]:
    """The modules imported after each of the commands, by the words of the command."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = map(json.loads, done.stdout.splitlines())
    return {" ".join(words): set(modules) for words, modules in found}
