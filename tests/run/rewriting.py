"""The rewriting of assertions in test modules, which pytest does at import, shared between the processes of a run."""

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parents[1]


def rewrite_share(config: pytest.Config, number: int, count: int) -> None:
    """Rewrite the assertions of a share of the test modules, and store the code where pytest looks for it.

    By itself each process would rewrite all of them in a new checkout.

    Args:
        config: the configuration of this process.
        number: position of this process among all.
        count: number of processes.
    """
    for path in sorted(TESTS.rglob("test_*.py"))[number::count]:
        stored = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, stored) is None and rewrite.try_makedirs(stored.parent):
            digest, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, stored)
