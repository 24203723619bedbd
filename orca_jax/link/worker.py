"""A worker process: `python -m orca_jax.serve --node-rank I`, with I from 1 on. It has no HTTP and no engine.

The main thread builds an executor and repeats the leader's calls. The thread of the connection ends the process.
"""

import logging
import signal
import threading
import time
from functools import partial
from types import FrameType
from typing import NoReturn

from orca_jax.cluster.exits import ExitStatus, exit_now
from orca_jax.cluster.messages import Serving, WorkerFailed
from orca_jax.cluster.worker import Follower, Stillness, WorkerStatus
from orca_jax.cluster.worker_link import WorkerLink
from orca_jax.helpers.bundled import pinned
from orca_jax.helpers.logs import end_at_failed_threads, install_handler
from orca_jax.link.watch import STEP_FACTOR, ProgressWatch, limit_and_place
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import ClusterConfig, StartTimes, limit_arenas
from orca_jax.values.step import Executor

# for the leader to report the loss of another process, if that was the cause of a failure
_CAUSE_SECONDS = 1.0
_ANSWER_SECONDS = 2.0  # for the leader to take a failure
_LEAVE_SECONDS = 10.0  # beside `shutdown_timeout`, for the leader to end

logger = logging.getLogger("orca_jax.link.worker")


def run_worker(config: ServerConfig) -> NoReturn:
    """Follow the leader until one of them ends, and end the process with an `ExitStatus`.

    Raises:
        ConfigError: a setting is wrong, or the leader refuses this process; `param` names the setting.
    """
    cluster = config.cluster
    assert cluster is not None, "a worker is one of several processes"
    limit_arenas()  # before other threads allocate
    install_handler(config.log_format, process=f"worker {config.node_rank}")
    signals = _WorkerSignals(config.shutdown_timeout)
    from orca_jax.assembly.cluster import build_worker, hello_of

    times = StartTimes()
    engine = pinned(config.engine)
    status = WorkerStatus()
    link = WorkerLink(
        cluster, hello_of(cluster.node_rank, cluster.nnodes, config.engine.model), status.beat, _end
    )
    end_at_failed_threads(partial(_end_failed, link))
    welcome = link.join()
    signals.is_needed = True
    logger.info("joined the cluster as worker %d of %d", cluster.node_rank, cluster.nnodes)
    try:
        executor = build_worker(link, welcome, engine, times)
        plans = link.plan_socket(welcome)
        follower = Follower(executor, plans, link, status)
        status.stillness = _stillness(executor, cluster)
        link.serve()
        link.send(Serving())
        follower.repeat_calls()
    except ConfigError as error:
        link.fail(WorkerFailed(error.message, error.param, is_config=True))
        time.sleep(_ANSWER_SECONDS)
        raise
    except BaseException as error:  # also a panic of a library
        time.sleep(_CAUSE_SECONDS)
        logger.exception("the worker failed")
        link.fail(WorkerFailed(type(error).__name__))
        time.sleep(_ANSWER_SECONDS)
        exit_now(ExitStatus.ENGINE_FAILED)


def _stillness(executor: Executor, config: ClusterConfig) -> Stillness:
    watch = ProgressWatch()
    thread = threading.get_ident()

    def look(turns: int | None) -> tuple[float, float, str]:
        still = watch.look(turns)
        limit = max(config.control_timeout, STEP_FACTOR * executor.expected_seconds)
        return still, *limit_and_place(limit, still, thread)

    return look


class _WorkerSignals:
    """Handlers of SIGTERM and SIGINT. Often all processes get them at once, and the leader needs the worker to drain.

    After the first signal a worker that has joined waits for the leader's end; the second one ends the process.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience + _LEAVE_SECONDS
        self._has_come = False
        self.is_needed = False  # True: the worker has joined
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._has_come or not self.is_needed:
            exit_now(ExitStatus.DONE)
        self._has_come = True
        threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        logger.info(
            "got a signal; waiting for the leader to end. A second signal ends this process, and the cluster"
        )
        time.sleep(self._patience)
        exit_now(ExitStatus.DONE)


def _end_failed(link: WorkerLink, reason: str) -> None:
    """Report that a thread of this process has failed, and end the process."""
    link.fail(WorkerFailed(reason))
    time.sleep(_ANSWER_SECONDS)
    exit_now(ExitStatus.ENGINE_FAILED)


def _end(reason: str, status: int) -> None:
    level = logging.INFO if status == ExitStatus.DONE else logging.ERROR
    logger.log(level, "this worker ends: %s", reason)
    exit_now(status)
