"""Code blocks of the documentation: each is run by a test, or says why not. Every command line parses.

A comment above a block gives the reason: `<!-- not run: needs a TPU -->`.
"""

import subprocess

import pytest

from tests.docs.commands import check, commands
from tests.docs.pages import PAGES, SHELL, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]
"""Flags of other programs in sentences."""
FOREIGN = frozenset({"--time", "--gpus", "--device", "--group-add", "--privileged", "--trials"})


def test_the_languages_of_blocks_are_known() -> None:
    assert {block.language for block in BLOCKS} <= {*SHELL, "python", "json", "text", "yaml"}


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_commands_parse(block: Block) -> None:
    subprocess.run(["bash", "-n", "-c", block.text], check=True)
    for command in commands(block.text):
        check(command)
