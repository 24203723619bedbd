"""A run with a limit of time begins no test after it, and its order of files depends on the day."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.run.until import OVER, Until


def order(day: str) -> list[str]:
    """The tests of ten files in the order of a day, each with the name of its file."""
    items = [
        Mock(path=Path(f"{file}.py"), test=f"{file}{n}") for file in "abcdefghij" for n in (0, 1)
    ]
    Until(1, day).pytest_collection_modifyitems(items)
    return [item.test for item in items]


def test_the_order_of_files_depends_on_the_day() -> None:
    first = order("2026-11-30")
    assert first == order("2026-11-30") != order("2026-12-01")
    assert sorted(first) != first, "files change places"
    pairs = zip(first[::2], first[1::2], strict=True)
    assert all([(one[0], one[1], two[1]) == (two[0], "0", "1") for one, two in pairs])


def test_a_test_that_would_begin_too_late_is_skipped_and_counted() -> None:
    item = Mock(spec=pytest.Item)
    Until(100, "").pytest_runtest_setup(item)
    late = Until(-1, "2026-11-30")
    with pytest.raises(pytest.skip.Exception, match=OVER):
        late.pytest_runtest_setup(item)
    reports = [
        SimpleNamespace(longrepr=("file", 1, f"Skipped: {reason}"))
        for reason in (OVER, OVER, "no GPU")
    ]
    reporter = Mock(stats={"skipped": reports})
    late.pytest_terminal_summary(reporter)
    (line,) = reporter.write_line.call_args.args
    assert line.startswith("2 tests did not run") and "--day 2026-11-30" in line
