"""Mutants are small changes of valid code, in an order that depends on the seed; near tests come first."""

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import FOLDERS, drawn
from tests.mutants.choice import near_tests
from tests.mutants.mutations import mutants
from tests.project.source import ROOT, SourceFile, source_file

CODE = '''"""About."""


def known(x: "int | None", scale: float = 0.5) -> bool:
    if x is None:
        raise ValueError(f"{x} is not {1}")
    return other(x, 2, key=True) > scale  # é
'''
CHANGES = [
    ("constant changed", "0.5", "1.5"),
    ("branch negated", "x is None", "not x is None"),
    ("comparison flipped", "x is None", "x is not None"),
    ("return replaced", "other(x, 2, key=True) > scale", "None"),
    ("comparison flipped", "other(x, 2, key=True) > scale", "other(x, 2, key=True) >= scale"),
    ("argument dropped", "other(x, 2, key=True)", "other(x, 2)"),
    ("constant changed", "2", "3"),
    ("constant changed", "True", "False"),
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceFile:
    monkeypatch.setattr("tests.project.source.ROOT", tmp_path)
    (tmp_path / "known.py").write_text(CODE, encoding="utf-8")
    return SourceFile(Path("known.py"))


def test_each_kind_of_change_is_found(file: SourceFile) -> None:
    assert [(each.kind, each.old, each.new) for each in mutants(file)] == CHANGES


def test_a_mutant_differs_in_one_place(file: SourceFile) -> None:
    for mutant in mutants(file):
        line = mutant.node.lineno - 1
        before, after = CODE.splitlines(), mutant.text().splitlines()
        assert after[line] == before[line].replace(mutant.old, mutant.new, 1) != before[line]
        assert after[:line] == before[:line] and after[line + 1 :] == before[line + 1 :]
        ast.parse(mutant.text())


def test_the_order_depends_on_the_seed_alone() -> None:
    first, again, other = (
        [(mutant.place, mutant.new) for mutant in drawn(seed)[:20]] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)


def test_tests_of_a_module_begin_with_the_nearest() -> None:
    found = near_tests(source_file(Path("orca_jax/sched/kv.py")))
    assert found[0] == "tests/sched/test_kv.py" and len(found) > 1
    assert "tests/docs/test_links.py" not in found


def test_a_module_that_no_test_imports_has_the_tests_of_its_folder() -> None:
    found = near_tests(source_file(Path("orca_jax/serve/openai/chat.py")))
    assert found and all(path.startswith("tests/openai/") for path in found)
