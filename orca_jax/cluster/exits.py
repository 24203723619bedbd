"""The exit statuses of the processes of a cluster. docs/deployment.md explains them to operators."""

import contextlib
import os
import sys
from enum import IntEnum
from typing import NoReturn


class ExitStatus(IntEnum):
    """The reason for the end of a process, for the engine or the script above it."""

    DONE = 0  # a signal, or the orderly end of the leader
    ENGINE_FAILED = 1  # this process's own engine failed or hung
    CONFIG = 2  # a setting is wrong, or the leader has refused the process
    CLUSTER_LOST = 3  # a worker was killed, stopped, cut off or stuck, or its results differed
    LEADER_LOST = 4  # workers: the leader has gone
    RUNTIME = 6  # JAX has ended the process; the number of SIGABRT


def exit_now(status: int) -> NoReturn:
    """End this process at once: its main thread may be stuck in a device."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
