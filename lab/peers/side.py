"""One side of a comparison: a process that holds a loaded model and runs a pass for each request of the caller.

The protocol is described in `lab/peers/programs/common.py`: `@peer {"ready": ...}` once, then `@peer {"pass": ...}` for
each line that the process reads.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TextIO

from orca_jax.values.errors import OrcaError

PREFIX = "@peer "
_END_SECONDS = 30.0  # from the end of its input to the end of the process

type Keep = Callable[[Mapping[str, Any]], None]
"""Takes a part of the results, as soon as it is measured."""


class Side:
    """A running program. A context manager, which ends the process at its end."""

    def __init__(self, name: str, command: Sequence[str], timeout: float) -> None:
        """Start the program.

        Args:
            name: the name in messages.
            command: the program with its flags.
            timeout: seconds until the model is loaded, and of one pass.
        """
        self.name = name
        self._timeout = timeout
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._last_line = "nothing"  # of its output, without messages
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, True), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, False), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def has_ended(self) -> bool:
        """True if the program is no longer running."""
        return self._process.poll() is not None

    def about(self) -> dict[str, Any]:
        """Wait until the model is loaded; return versions and settings. Raises OrcaError if the program ends."""
        return self._next("ready")

    def run_pass(self) -> dict[str, float]:
        """Run the workload once; return the figures of the pass. Raises OrcaError if the program ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the program has ended: its messages have too
            self._process.stdin.write("pass\n")
            self._process.stdin.flush()
        return self._next("pass")

    def close(self) -> None:
        """End the process: by the end of its input, then by a signal."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # processes that it left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, stream: TextIO, has_messages: bool) -> None:
        """Read a stream to its end, in a thread: a full pipe would stop the program."""
        try:
            with stream:
                for line in stream:
                    if has_messages and line.startswith(PREFIX):
                        self._messages.put(json.loads(line.removeprefix(PREFIX)))
                    elif line.strip():
                        self._last_line = line.strip()
        finally:
            if has_messages:
                self._messages.put(None)

    def _next(self, kind: str) -> dict[str, Any]:
        try:
            message = self._messages.get(timeout=self._timeout)
        except queue.Empty:
            self._process.kill()
            raise OrcaError(
                f"{self.name} took more than {self._timeout:g} seconds; raise --timeout"
            ) from None
        if message is None or kind not in message:
            self.close()
            code = self._process.returncode
            raise OrcaError(
                f"{self.name} ended with code {code}; its output ends with: {self._last_line}"
            )
        found: dict[str, Any] = message[kind]
        return found
