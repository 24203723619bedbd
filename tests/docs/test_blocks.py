"""Code blocks of the documentation: each is run by a test, or says why not. Every command line parses.

A comment above a block gives the reason: `<!-- not run: needs a TPU -->`.
"""

import ast
import importlib
import json
import re
import subprocess

import pytest

from orca_jax.cli.main import SUBCOMMANDS
from orca_jax.flags.habits import is_habit
from tests.docs.commands import check, commands, known_flags
from tests.docs.pages import PAGES, SHELL, Block, blocks, code_spans
from tests.docs.running import NOT_RUN, RUN_BY, is_program, is_run
from tests.docs.test_run import RUN
from tests.project import quickstart
from tests.project.source import ROOT

BLOCKS = {page: list(blocks(page)) for page in PAGES}
FOREIGN = frozenset(  # flags of other programs in sentences
    """--build-arg --cache-clear --device --fresh-programs --gpus --group-add --hypothesis-profile --optimised
    --pack-destination --platform --privileged --read-only --require-hashes --scheduler-cls --strict --thought
    --time --tmpfs --until
    """.split()  # noqa: SIM905
)
_VLLM = json.loads((ROOT / "tests/flags/vllm_0.32.0.json").read_text(encoding="utf-8"))
VLLM = {*_VLLM["serve"], *_VLLM["removed"]}
# A block whose text is in a table of the tests of the page, by `RUN_BY`.
OF_TESTS = {"docs/quickstart.md": [text for _, text in quickstart.BLOCKS]}


def test_the_languages_of_blocks_are_known() -> None:
    languages = {*SHELL, "python", "js", "json", "text", "toml", "yaml"}
    assert {block.language for found in BLOCKS.values() for block in found} <= languages


def test_pages_and_files_of_the_tables_exist() -> None:
    assert {*NOT_RUN, *RUN_BY} <= set(PAGES) and all(
        (ROOT / file).is_file() for file in RUN_BY.values()
    )
    assert all(is_program(block) for page in NOT_RUN for block in BLOCKS[page] if block.mark)


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page: str) -> None:
    for block in filter(is_program, BLOCKS[page]):
        ways = [
            block in RUN[page],
            block.mark is not None,
            page in NOT_RUN,
            block.text in OF_TESTS.get(page, []),
        ]
        assert sum(ways) == 1, (
            f"{block}: run it by a test, or give the reason above it: <!-- not run: REASON -->"
        )


@pytest.mark.parametrize("page", PAGES)
def test_reasons_name_tests_that_exist(page: str) -> None:
    reasons = [NOT_RUN.get(page, ""), *(block.mark or "" for block in BLOCKS[page])]
    for path in re.findall(r"tests/[\w/.]+", " ".join(reasons)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("checkpoints/")])
def test_commands_parse(page: str) -> None:
    """The cards of the models are left out: they have the command of a training in the past."""
    found = [block for block in BLOCKS[page] if block.language in SHELL]
    for block in found:
        subprocess.run(["bash", "-n", "-c", block.text], check=True)
        for command in commands(block.text):
            check(command)


@pytest.mark.parametrize("page", PAGES)
def test_imports_of_python_blocks_exist(page: str) -> None:
    for block in BLOCKS[page]:
        if "needs the packages" in (block.mark or ""):  # of other projects
            continue
        for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), block


# it has flags of other engines
@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/peers.md"])
def test_flags_in_sentences_exist(page: str) -> None:
    for span in code_spans(page):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            is_of_vllm = page == "docs/vllm.md" and flag.removeprefix("--") in VLLM
            is_of_llama = page == "docs/flags.md" and is_habit(flag)
            assert flag in known_flags() or flag in FOREIGN or is_of_vllm or is_of_llama, (
                f"{page}: {span}"
            )


@pytest.mark.parametrize("page", PAGES)
def test_a_subcommand_has_one_name(page: str) -> None:
    """README.md alone says that `python -m orca_jax.NAME` is the same."""
    parts = "|".join(
        found.module.removesuffix(".__main__").split(".")[-1] for found in SUBCOMMANDS.values()
    )
    text = (
        (ROOT / page)
        .read_text(encoding="utf-8")
        .replace("is the same as `python -m orca_jax.serve`", "")
    )
    assert not re.findall(rf"python -m orca_jax\.(?:{parts})\b(?!\.)[^\n]*", text), (
        "write: orca-jax NAME"
    )


@pytest.mark.parametrize(
    "text",
    [
        "python -m orca_jax.serve --max-model-length 5",
        "orca-jax batch -i a",
        "./scripts/serve --max-num-seqs few",
        "python -m orca_jax bench offlin",
        "python scripts/nowhere.py",
        "python -m lab.measured.log_lengths --nothing",
        "python -m pytest tests/nowhere",
        "orcajax serve",
    ],
)
def test_wrong_commands_are_found(text: str) -> None:
    (command,) = commands(text)
    with pytest.raises(AssertionError):
        check(command)


def test_commands_of_a_block() -> None:
    text = "A=1 time a b  # c; d\n(cd x && ./scripts/serve --port 1 > log &)\n\ne 'f # g' \\\n  h\n"
    assert list(commands(text)) == [
        ["a", "b"],
        ["cd", "x"],
        ["./scripts/serve", "--port", "1"],
        ["e", "f # g", "h"],
    ]


def test_blocks_have_marks() -> None:
    marked = [block for found in BLOCKS.values() for block in found if block.mark]
    assert marked and not [block for block in marked if is_run(block)]
    assert Block("README.md", 1, "bash", "a", None).mark is None
