"""A run with a limit of time: `scripts/test --until SECONDS` begins no further test after so many seconds.

The order of the files depends on the day, so that in the course of days all tests run. A test that did not begin is
skipped, and the summary has their number: the time is no failure.
"""

import random
import time
from itertools import groupby

import pytest

OVER = "the time of --until is over"


class Until:
    """A plugin of pytest: it shuffles files, and skips tests that would begin too late.

    Args:
        seconds: the time from now on in which tests begin.
        day: the seed of the order.
    """

    def __init__(self, seconds: float, day: str) -> None:
        self.end = time.monotonic() + seconds
        self.day = day

    @pytest.hookimpl(trylast=True)  # after -m selected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Shuffle the files, and keep the order of the tests of a file, which share what they built."""
        files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
        random.Random(self.day).shuffle(files)
        items[:] = [item for tests in files for item in tests]

    @pytest.hookimpl(tryfirst=True)  # before fixtures are built
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that would begin too late."""
        if time.monotonic() > self.end:
            pytest.skip(OVER)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the number of tests that did not run."""
        skipped = terminalreporter.stats.get("skipped", [])
        late = [report for report in skipped if OVER in str(report.longrepr)]
        order = f"the order of the files is that of --day {self.day}"
        terminalreporter.write_line(f"{len(late)} tests did not run: {OVER}; {order}")
