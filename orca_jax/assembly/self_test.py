"""Tries the attention kernels in their own process before the engine takes the device.

A kernel may give wrong results on hardware or with a driver on which it was never run, and it may hang or kill its
process. So each one that this engine would use runs once beside plain XLA, with this model's shapes. If it fails, the
next implementation is tried in its place.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Literal

from orca_jax.assembly.choices import PageChoices
from orca_jax.values.config import AttentionName, DType, ModelConfig, page_dtype

if TYPE_CHECKING:
    from orca_jax.kernels.ragged_attention.self_test import Trial

Result = Literal["ok", "wrong", "error", "hang", "crash"]

COMMAND = (sys.executable, "-m", "orca_jax.kernels.ragged_attention.self_test")
_KILL_SECONDS = 5.0  # for the end of a killed process; one that waits for a dead device never ends

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelfTest:
    """The result of one implementation."""

    implementation: str  # "unknown" if the process ended before it had chosen one
    result: Result
    detail: str = ""


@dataclass(frozen=True)
class Outcome:
    """The tests of a start, in order, and the implementation to use."""

    tests: tuple[SelfTest, ...] = ()
    implementation: str | None = None  # None: as configured


def try_kernels(
    model: ModelConfig,
    dtype: DType,
    tensor: int,
    pages: PageChoices,
    wanted: AttentionName | None,
    folder: str | None,
    num_hosts: int = 1,
) -> Outcome:
    """Try the kernels of an accelerator with the shapes of a model.

    Args:
        model: gives the shapes.
        dtype: the type of weights and activations.
        tensor: devices of a stage.
        pages: the pages of the settings.
        wanted: the implementation of the settings.
        folder: keeps compiled programs; None: they are not kept.
        num_hosts: processes of the engine.
    """
    import jax

    if not has_accelerator_support(jax.config.jax_platforms):
        return Outcome()
    from orca_jax.exec.memory import has_jax_started
    from orca_jax.kernels.ragged_attention.self_test import Trial
    from orca_jax.model.sharding import on_shards, uneven_parts

    if num_hosts > 1 and importlib.util.find_spec("libtpu"):
        logger.info(
            "the attention kernels are not tested: a TPU of several hosts waits for a process on each of them"
        )
        return Outcome()
    if has_jax_started():
        logger.info(
            "the attention kernels are not tested: JAX has started, and may keep the device from other processes"
        )
        return Outcome()
    # An error will say that a model does not divide.
    if uneven_parts(model, tensor):
        return Outcome()
    held = on_shards(model, tensor)
    page = held.page_shape
    trial = Trial(
        num_heads=held.num_heads // tensor,
        num_kv_heads=page.num_kv_heads // tensor,
        head_dim=page.head_dim,
        has_values=page.has_values,
        page_size=pages.size,
        dtype=dtype,
        page_dtype=dtype if pages.dtype == "auto" else page_dtype(pages.dtype),
        implementation=wanted,
    )
    return try_implementations(trial, folder)


def has_accelerator_support(platforms: str | None) -> bool:
    """True if JAX in this environment could find an accelerator; `platforms` is its setting `jax_platforms`.

    JAX itself is not asked: a process that has looked at a TPU keeps it from all others.
    """
    if platforms and set(platforms.split(",")) == {"cpu"}:
        return False
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(
        importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu")
    )


def try_implementations(
    trial: "Trial", compile_cache: str | None, command: Sequence[str] = COMMAND
) -> Outcome:
    """Try implementations until one is right, or in plain XLA. Logs one warning if any failed.

    Args:
        trial: shapes of the model, and the configured implementation.
        compile_cache: directory of JAX's cache for the programs of the test.
        command: the process, without the trial.
    """
    logger.info(
        "testing the attention kernels in a process of their own, for %d s at most", trial.seconds
    )
    tests: list[SelfTest] = []
    chosen: str | None = None
    while chosen is None:
        failed = tuple(test.implementation for test in tests)
        found = _run(replace(trial, failed=failed), compile_cache, command)
        test = _result(found, trial.seconds)
        if test is not None:
            tests.append(test)
        if test is None or test.result == "ok":
            chosen = found.said.get("implementation")
            break
        if test.implementation == "unknown":
            break
        chosen = found.said.get("plain_instead")
    wrong = [test for test in tests if test.result != "ok"]
    if not wrong:
        return Outcome(tuple(tests))
    problems = "; ".join(
        f"{test.implementation!r} ({test.result}: {test.detail})" for test in wrong
    )
    instead = "they are used untested"
    if chosen:
        instead = f"attention by {chosen!r} is used instead, which is slower"
    logger.warning("attention kernels failed their self-test: %s; %s", problems, instead)
    return Outcome(tuple(tests), chosen)


@dataclass(frozen=True)
class _Ended:
    """A process after its end."""

    said: dict[str, Any]  # the fields of all lines
    code: int | None  # None: it was stopped
    last_error: str


def _run(trial: "Trial", compile_cache: str | None, command: Sequence[str]) -> _Ended:
    """Run one process."""
    from orca_jax.exec.memory import sharing_environment

    with _memory_file() as out, _memory_file() as errors:
        # Files, not pipes: a process that cannot be killed would keep a pipe open.
        process = subprocess.Popen(
            [*command, trial.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=sharing_environment(compile_cache),
        )
        try:
            code: int | None = process.wait(trial.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        said: dict[str, Any] = {}
        for line in _lines(_text(out)):
            said |= line
        return _Ended(said, code, "".join(_text(errors).strip().splitlines()[-1:]))


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process if it runs, and wait for its end for a moment."""
    if process.poll() is not None:
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def _result(ended: _Ended, seconds: int) -> SelfTest | None:
    """The result of a process; None on a CPU, for plain XLA, and if the configured implementation cannot be used."""
    said = ended.said
    code = ended.code
    name = ended.said.get("implementation", "unknown")
    if "result" in said:
        return SelfTest(name, said["result"], said["detail"])
    if code is None or code == -signal.SIGALRM:
        return SelfTest(name, "hang", f"no result after {seconds} s")
    if code < 0:
        return SelfTest(name, "crash", f"ended by {signal.Signals(-code).name}")
    if code > 0:
        return SelfTest(name, "error", ended.last_error[:400] or f"exit status {code}")
    if said.get("is_plain") is False:
        return SelfTest(name, "crash", "ended without a result")
    return None


def _memory_file() -> IO[bytes]:
    """Open a file without a name. It is in memory: a container may have no folder that can be written."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("orca-self-test"), "w+b")
    return tempfile.TemporaryFile()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _lines(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects; libraries may print others."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found
