"""The limit of open files of this process: each connection is one."""

import os
import resource

MAX_OPEN_FILES = 65536


def raise_file_limit() -> None:
    """Raise the soft limit of open files, up to the hard one: the usual 1024 is for programs with `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def file_limit() -> int:
    """The limit of open files; `2**31` if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 2**31
    return limit


def num_open_files() -> int:
    """The number of open files of this process."""
    return len(os.listdir("/dev/fd"))


def free_files(reserved: int) -> int:
    """The number of files that this process may still open, beside `reserved` ones; negative if there are fewer."""
    return file_limit() - num_open_files() - reserved
