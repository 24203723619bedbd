"""The exit statuses of the processes of a cluster. docs/hosts.md explains them to operators."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """The reason for which a process has ended, for the engine or the script that started it."""

    DONE = 0  # a signal, or the orderly end of the leader
    ENGINE_FAILED = 1  # this process's own engine failed or hung
    CONFIG = 2  # a setting is wrong, or the leader has refused the process
    CLUSTER_LOST = 3  # a worker was killed, stopped, cut off or stuck, or its results differed
    LEADER_LOST = 4  # workers: the leader has gone
    RUNTIME = 6  # JAX has ended the process; the number of SIGABRT
