"""Mutants are small changes of valid code, in an order that depends on the seed; tests of their lines come first."""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.mutants.__main__ import FOLDERS, KILLED, Outcomes, drawn
from tests.mutants.choice import chosen, near_tests
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.seen import Seen
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


KV = Path("orca_jax/sched/kv.py")
NEAR, OTHER = "tests/sched/test_kv.py", "tests/sim/test_toy.py"
SECONDS = {
    f"{NEAR}::test_long": 8.0,
    f"{NEAR}::test_short": 1.0,
    f"{NEAR}::test_of_the_rest": 0.5,
    f"{OTHER}::test_shortest": 0.1,
    "tests/docs/test_links.py::test_far": 0.1,
}


class Lines:
    """What coverage knows: the tests of some lines."""

    def __init__(self, *tests: str) -> None:
        self._tests = tests

    def contexts_by_lineno(self, path: str) -> Mapping[int, Sequence[str]]:
        assert path == str(ROOT / KV)
        contexts = tuple(f"{test} (call)" for test in self._tests)
        return dict.fromkeys(range(1, 10_000), contexts)


@pytest.fixture
def seen_by(tmp_path: Path) -> Callable[..., Seen]:
    """Makes what an earlier run has seen: all lines by some tests of two folders."""

    def make(*tests: str) -> Seen:
        for name, seconds in SECONDS.items():
            folder = tmp_path / name.replace("/", ".")
            folder.mkdir()
            (folder / "seconds.json").write_text(json.dumps({name: seconds}), encoding="utf-8")
        seen = Seen(tmp_path)
        seen.__dict__["_data"] = [Lines(*tests[:1]), Lines(*tests[1:])]
        return seen

    return make


def of_kv(is_in_a_function: bool) -> Mutant:
    return next(
        each for each in mutants(source_file(KV)) if (each.lines() is not None) == is_in_a_function
    )


def test_tests_that_run_the_line_come_first(seen_by: Callable[..., Seen]) -> None:
    seen = seen_by(f"{OTHER}::test_shortest", f"{NEAR}::test_long", f"{NEAR}::test_short")
    expected = [
        f"{NEAR}::test_short",
        f"{NEAR}::test_long",
        f"{OTHER}::test_shortest",
        f"{NEAR}::test_of_the_rest",
    ]
    for is_in_a_function in (True, False):
        assert chosen(of_kv(is_in_a_function), seen, 60) == expected
    assert chosen(of_kv(True), seen, 9.05) == expected[:2]
    assert chosen(of_kv(True), seen, 0.5) == expected[:1]


def test_a_line_that_no_test_runs_has_none(seen_by: Callable[..., Seen]) -> None:
    seen = seen_by("tests/sched/test_kv.py::test_that_is_gone")
    assert chosen(of_kv(True), seen, 60) == []
    assert chosen(of_kv(False), seen, 60) != []


def test_lines_of_code_that_runs_on_import_are_unknown(file: SourceFile) -> None:
    assert [each.lines() for each in mutants(file)] == [
        None,
        *[range(5, 6)] * 2,
        *[range(7, 8)] * 5,
    ]


def test_outcomes_are_kept_for_later_commands(file: SourceFile, tmp_path: Path) -> None:
    first, second, *_ = mutants(file)
    Outcomes(tmp_path / "kept").put(first, KILLED)
    again = Outcomes(tmp_path / "kept")
    assert [again.get(first), again.get(second)] == [KILLED, None]
