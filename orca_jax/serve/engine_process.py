"""The engine's own process: `python -m orca_jax.serve.engine_process FD`, started by the front end.

Two threads. One reads the socket into the inbox, also while the engine loads or computes, so that the process ends
when its front end does. The main thread owns the engine and is the only one that writes.
"""

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

from orca_jax.build import DEMO, build_engine, demo_directory
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError, RequestError
from orca_jax.serve.wire import (
    Abort,
    Failed,
    FrameReader,
    Message,
    Ready,
    Rejected,
    Start,
    Submit,
    ToEngine,
    Updates,
    decode_to_engine,
    encode,
)

LAST_WORDS_SECONDS = 1.0  # between the front end's end and this process's, whatever it is doing

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[ToEngine | None]  # None: the front end has gone
Send = Callable[[Message], None]


def main(argv: list[str]) -> int:
    """Serve the front end at the other end of socket `argv[1]`. Returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    logging.getLogger("orca_jax").setLevel(logging.INFO)  # libraries: warnings only
    connection = socket.socket(fileno=int(argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True, name="inbox").start()

    def send(message: Message) -> None:
        connection.sendall(encode(message))

    try:
        return _run(inbox, send)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the front end has gone, and with it everybody who waited
    except ConfigError as error:
        send(Failed(error.message, error.param, is_config=True))
        return 2
    except Exception as error:
        logger.exception("the engine failed")
        send(Failed(f"the engine failed: {type(error).__name__}"))  # clients see this: no paths, no values
        return 1


def _run(inbox: Inbox, send: Send) -> int:
    start = inbox.get()
    if not isinstance(start, Start):
        return 0
    built = build_engine(start.config)
    ready = Ready(
        source=_source(start.config.model),
        tokenizer=built.tokenizer.source,
        vocab_size=built.model_config.vocab_size,
        max_model_len=built.max_model_len,
        n_slots=built.engine.pool.kv.n_slots,
        num_rows=start.config.max_num_seqs * start.config.n_workers,
    )
    send(ready)
    serve(built.engine, inbox, send)
    return 0


def _source(model: str) -> str:
    """The model's directory; empty for a preset."""
    if model.startswith("preset:"):
        return ""
    return str(demo_directory()) if model == DEMO else model


def serve(engine: Engine, inbox: Inbox, send: Send) -> None:
    """Step while there is work, sleep in the inbox while there is none; returns when the front end has gone."""
    while True:
        while not (engine.has_work and inbox.empty()):
            message = inbox.get()
            if message is None:
                return
            _take(engine, message, send)
        updates = engine.step()
        if updates:
            stats = engine.stats
            send(Updates(updates, running=stats.running, waiting=stats.waiting))


def _take(engine: Engine, message: ToEngine, send: Send) -> None:
    match message:
        case Submit(request_id, prompt_ids, params):
            try:
                engine.add(request_id, prompt_ids, params)
            except RequestError as error:
                send(Rejected(request_id, error.message, error.param))
        case Abort(request_id):
            engine.abort(request_id)
        case Start():
            raise ValueError("the engine was started twice")


def _read(connection: socket.socket, inbox: Inbox) -> None:
    frames = FrameReader()
    try:
        while data := connection.recv(1 << 18):
            for payload in frames.feed(data):
                inbox.put(decode_to_engine(payload))
    except ConnectionResetError:
        pass
    except Exception:
        logger.exception("the front end sent something unreadable")
    inbox.put(None)
    time.sleep(LAST_WORDS_SECONDS)
    os._exit(1)  # the main thread is loading, compiling or stuck: nobody is left to wait for it


if __name__ == "__main__":
    sys.exit(main(sys.argv))
