"""Records the last time at which each file of the package ran a function; SIGUSR2 writes the record to a file.

A test puts this folder on the module search path of a server, so that its front end and its engine process record
themselves. Times are of the machine's monotonic clock, which all processes share.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER = os.environ.get("ORCA_JAX_TRACER")
_last: dict[str, float] = {}


def trace(frame: FrameType, event: str, arg: object) -> None:
    """Note a call; no line of the function is traced."""
    code = frame.f_code
    if "/orca_jax/" in code.co_filename and code.co_name != "<module>":
        _last[code.co_filename] = time.monotonic()


def write(number: int, frame: FrameType | None) -> None:
    """Write the record, whole or not at all."""
    assert FOLDER is not None, "only installed with a folder"
    path = Path(FOLDER) / f"{os.getpid()}.json"
    path.with_suffix(".part").write_text(json.dumps(dict(_last)), encoding="utf-8")
    path.with_suffix(".part").rename(path)


if FOLDER:
    signal.signal(signal.SIGUSR2, write)
    threading.settrace(trace)
    sys.settrace(trace)
