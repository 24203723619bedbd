"""The engine process: `python -m orca_jax.link.process FD FORMAT`, started by the front end.

The main thread owns the engine. One thread reads the socket into the inbox, also while the engine loads or computes, so
the process ends with its front end. One thread sends heartbeats. Two threads compile grammars and read adapters; a
request with a grammar enters the engine after the compilation.
"""

import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from orca_jax.assembly.built import Built
from orca_jax.assembly.devices import ONE_HOST
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.support import Facts, check_support
from orca_jax.cluster.exits import ExitStatus, exit_now
from orca_jax.helpers.console import has_terminal, lasting_output
from orca_jax.helpers.logs import end_at_failed_threads, install_handler
from orca_jax.link.engine_watch import EngineWatch
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox, Send, ready_message
from orca_jax.link.wire import Failed, Leave, Start, received, sender
from orca_jax.policy.errors import PolicyError
from orca_jax.values.errors import ClusterLostError, ConfigError
from orca_jax.values.startup import RARE_COLLECTIONS, ClusterConfig, StartTimes, limit_arenas

if TYPE_CHECKING:
    from orca_jax.assembly.cluster import LeaderBuild
    from orca_jax.link.kv_events import KvEventPublisher

HEARTBEAT_SECONDS = 0.5
LAST_SECONDS = 0.3  # for the last messages to the workers and the front end
EXIT_GRACE_SECONDS = 1.0  # between the front end's end and a forced exit

logger = logging.getLogger("orca_jax.link.process")  # `__name__` is "__main__"


def main(argv: list[str]) -> int:
    """Serve the front end over the socket with descriptor `argv[1]`, log in format `argv[2]`; return the exit code."""
    with lasting_output():
        return _main(argv)


def _main(argv: list[str]) -> int:
    limit_arenas()  # before other threads allocate
    gc.set_threshold(*RARE_COLLECTIONS)  # imports and programs make many objects that stay
    for number in (signal.SIGTERM, signal.SIGINT):
        # Both reach the whole group; the front end drains and then ends this process.
        signal.signal(number, signal.SIG_IGN)
    install_handler("json" if argv[2] == "json" else "text", process="engine")
    connection = socket.socket(fileno=int(argv[1]))
    # a child of this process must not keep the socket open after its end
    connection.set_inheritable(False)
    inbox: Inbox = queue.SimpleQueue()
    status = EngineStatus()
    send = sender(connection)
    end_at_failed_threads(partial(_end_failed, send))
    leaves = threading.Event()
    threading.Thread(
        target=_read, args=(connection, inbox, leaves), daemon=True, name="inbox"
    ).start()
    threading.Thread(
        target=_send_heartbeats, args=(status, send), daemon=True, name="heartbeat"
    ).start()
    start = inbox.get()
    if not isinstance(start, Start):
        return 0
    cluster: LeaderBuild | None = None

    def run() -> None:
        nonlocal cluster
        if start.cluster is not None:
            cluster = _lead(start.cluster, start.config.model, send)
        _run(start, inbox, send, status, cluster)

    code = _code_of(run, send)
    if cluster is not None:
        if code == ExitStatus.DONE and not leaves.is_set():
            code = ExitStatus.LEADER_LOST  # the front end was killed
        cluster.close(code)
        exit_now(code)  # without JAX's own end, which waits for all processes
    return code


def _code_of(run: Callable[[], None], send: Send) -> int:
    """Run the engine until the front end has gone, and return the exit code. A failure is logged and sent."""
    try:
        run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the front end has gone, and with it all clients
    except ConfigError as error:
        _send_last(send, Failed(error.message, error.param, is_config=True))
        return ExitStatus.CONFIG
    except ClusterLostError as error:
        _send_last(send, Failed(str(error), is_cluster=True))
        return ExitStatus.CLUSTER_LOST
    except PolicyError as error:
        logger.exception("the engine failed")
        reason = f"{error.name}, a class from outside, has a fault; the log above has the line"
        _send_last(send, Failed(f"the engine failed: {reason}"))
        return ExitStatus.ENGINE_FAILED
    except BaseException as error:  # also a panic of a library
        logger.exception("the engine failed")
        # Clients can see this message: no paths, no values.
        _send_last(send, Failed(f"the engine failed: {type(error).__name__}"))
        return ExitStatus.ENGINE_FAILED
    return ExitStatus.DONE


def _run(
    start: Start, inbox: Inbox, send: Send, status: EngineStatus, cluster: "LeaderBuild | None"
) -> None:
    status.enter("loading")
    times = StartTimes(start.begun)
    times.add_time("import", times.elapsed)
    with _publisher(start) as publisher:  # before the model: its address may be wrong
        built = build_engine(
            start.config,
            on_compile=lambda: status.enter("compiling"),
            times=times,
            announce=_log_without_bars,
            host=cluster or ONE_HOST,
        )
        if publisher is not None:
            built.engine.pool.kv.prefixes.watcher = publisher
        if start.explains:
            built.engine.pool.kv.prefixes.keep_lost()
        _serve(built, start, inbox, send, status)


def _publisher(start: Start) -> AbstractContextManager["KvEventPublisher | None"]:
    """The publisher of changes of the prefix cache, if the settings name its address. Raises ConfigError."""
    if start.kv_events is None:
        return nullcontext()
    check_support(Facts(start.config), "events")
    from orca_jax.link.kv_events import KvEventPublisher

    return KvEventPublisher(start.kv_events)


def _serve(built: Built, start: Start, inbox: Inbox, send: Send, status: EngineStatus) -> None:
    gc.collect()
    gc.freeze()  # loaded objects stay until the end; walking them would cost a collection 70 ms
    warn_of_reservations(built)
    live = EngineWatch(built.engine, built.timeline_header, send)
    updates = built.prepare_update
    reader = built.read_adapter
    loop = EngineLoop(
        built.engine, inbox, send, status, built.grammars.compile, live, updates, reader
    )
    status.enter("serving")
    send(status.heartbeat())  # the front end sees this phase even if the engine dies at once
    send(ready_message(built))
    loop.run_engine()
    built.engine.observer.flush()
    if built.engine.outer is not None:
        built.engine.outer.close()  # saves the last pages


def warn_of_reservations(built: Built) -> None:
    """Warn if the scheduler reserves so much for requests without a limit that they cannot fill the rows."""
    kv = built.engine.pool.kv
    most = built.max_model_len
    fitting = kv.num_fitting(1, most)
    if not kv.has_reservations or fitting >= kv.num_rows:
        return
    logger.warning(
        "--scheduler %s reserves slots for the prompt and max_tokens of a request when it is admitted; a chat without "
        "max_completion_tokens reserves the whole context, %d of %d slots, so at most %d of them run at once in %d "
        "rows: send max_completion_tokens, or use --scheduler chunked, which reserves nothing",
        built.timeline_header.config.scheduler, most, kv.n_slots, fitting, kv.num_rows,
    )  # fmt: skip


def _lead(config: ClusterConfig, model: str, send: Send) -> "LeaderBuild":
    # with ZeroMQ, which one process alone does not need
    from orca_jax.assembly.cluster import LeaderBuild

    return LeaderBuild(config, model, partial(_end, send))


def _end(send: Send, reason: str, status: int) -> None:
    """End this process, since another one was lost. The main thread may be stuck in a device."""
    is_config = status == ExitStatus.CONFIG
    _end_with(send, Failed(reason, is_config=is_config, is_cluster=not is_config), status)


def _end_with(send: Send, failed: Failed, status: int) -> None:
    _send_last(send, failed)
    time.sleep(LAST_SECONDS)
    exit_now(status)


def _send_last(send: Send, failed: Failed) -> None:
    """Send the reason of the end. The front end may have ended first, for example by the same wrong setting."""
    with contextlib.suppress(OSError):
        send(failed)


def _end_failed(send: Send, reason: str) -> None:
    """End this process, since one of its threads has failed. The main thread may be stuck in a device."""
    _end_with(send, Failed(f"the engine failed: {reason}"), ExitStatus.ENGINE_FAILED)


def _log_without_bars(text: str) -> None:
    """Log progress in the format of the log, unless bars are drawn."""
    if not has_terminal():
        logger.info("%s", text)


def _send_heartbeats(status: EngineStatus, send: Send) -> None:
    try:
        while True:
            send(status.heartbeat())
            time.sleep(HEARTBEAT_SECONDS)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the front end has gone; the reader ends the process


def _read(connection: socket.socket, inbox: Inbox, leaves: threading.Event) -> None:
    """Pass the front end's messages on. A last one, `Leave`, sets `leaves`.

    Raises:
        ValueError: a message is not one of the front end; `end_at_failed_threads` ends the process then.
    """
    with contextlib.suppress(ConnectionResetError):
        for message in received(connection):
            if isinstance(message, Leave):
                leaves.set()
            else:
                inbox.put(message)
    inbox.put(None)
    time.sleep(EXIT_GRACE_SECONDS)
    # the main thread is loading, compiling or stuck, and its work has no reader any more
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
