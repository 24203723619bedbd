"""Runs the blocks of the documentation from top to bottom of each page, in a clone with a home of its own."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.helpers.bundled import INSTALL_SMOLLM2, SMOLLM2, chosen_model
from tests.docs.pages import PAGES, Block, blocks
from tests.docs.running import is_run
from tests.project.quickstart import CLONED, Machine
from tests.project.source import ROOT

RUN = {page: [block for block in blocks(page) if is_run(block)] for page in PAGES}
FILES = {  # that the blocks read
    "in.jsonl": '{"prompt": "The sea", "max_tokens": 4, "temperature": 0}\n',
    "prompts.txt": "The sea was\nOnce there was\n",
    "key": "sk-docs\n",
}
PYTHON = """#!/usr/bin/env bash
case "$*" in
*--base-url*) exec {python} "$@" ;;
*) exec {bin}/python3 "$@" ;;
esac
"""
SERVER = ".venv/bin/orca-jax serve --model demo --served-model-name demo smollm2"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A clone in which the command of the package, Python and the files of `FILES` are found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    machine = Machine(tmp_path_factory.mktemp("docs"), port)
    machine.clone.mkdir()
    for name in (*CLONED, "docs", "tests"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, machine.clone / name)
    (machine.bin / "python").write_text(
        PYTHON.format(python=sys.executable, bin=machine.bin), encoding="utf-8"
    )
    (machine.bin / "python").chmod(0o755)
    machine.run("python3 -m venv .venv")
    for name, text in FILES.items():
        (machine.clone / name).write_text(text, encoding="utf-8")
    (machine.clone / "key").chmod(0o600)
    yield machine
    machine.stop()


def run(machine: Machine, block: Block) -> None:
    if block.language == "python":
        assert machine.run_python(block.text)
        return
    if "localhost:8000" in block.text and machine.server is None:
        machine.serve(SERVER)
    machine.run(block.text)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_the_blocks_of_a_page(page: str, machine: Machine) -> None:
    if page == "docs/smollm2.md" and chosen_model()[0] != SMOLLM2:
        pytest.skip(INSTALL_SMOLLM2)
    for name in ("out.jsonl", "out.jsonl.part"):
        for left in machine.clone.glob(f"{name}*"):
            left.unlink()
    before = {path: path.read_bytes() for path in Path(machine.clone, "docs").rglob("*.svg")}
    for block in RUN[page]:
        run(machine, block)
        for left in machine.clone.glob("out.jsonl*"):
            assert left.stat().st_size
            left.unlink()
    assert {path: path.read_bytes() for path in before} == before, (
        "a figure of the page is not current"
    )
