"""The errors that this package raises on purpose.

    OrcaError
    ├── ConfigError          a flag, an argument or a model's config.json is wrong; names the parameter
    │   └── CheckpointError  weights that do not fit the model; lists every problem at once
    ├── RequestError         one request is wrong; names the field; other requests are not affected
    └── EngineError          the engine cannot continue
        ├── EngineDeadError             the engine process ended
        │   └── ClusterLostError        a process on another host was lost
        └── CompileWhileServingError    XLA compiled after start-up, with `strict_compile` set

A user's mistake is a `ConfigError` or a `RequestError`, and its message describes the correction.
Lack of memory is not an error: requests wait.
"""

import errno
from collections.abc import Mapping, Sequence

UNREADABLE = (ValueError, RecursionError)
"""The errors of bytes that cannot be decoded. msgspec raises its own errors, UnicodeDecodeError and RecursionError."""


class OrcaError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(OrcaError, ValueError):
    """A setting is wrong. `param` is the name of the flag or of the file to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


MAX_SHOWN = 50  # problems in the message of a `CheckpointError`; a damaged index may have a million


class CheckpointError(ConfigError):
    """The weights of `source` do not fit the model. `problems` holds one line per mismatch; `remedy` is what to do."""

    def __init__(self, source: str, problems: Sequence[str], remedy: str = "") -> None:
        self.source = source
        self.problems = tuple(problems)
        shown = [f"  - {problem[:500]}" for problem in self.problems[:MAX_SHOWN]]
        more = len(self.problems) - len(shown)
        lines = [f"{source} does not fit the model:", *shown]
        if more:
            lines.append(f"  - and {more} more")
        if remedy:
            lines.append(remedy)
        super().__init__("\n".join(lines), param="model")


class RequestError(OrcaError, ValueError):
    """One request is wrong. `param` is the name of the field to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def is_panic(error: BaseException) -> bool:
    """True for the error of a panic in a library written in Rust.

    This error is no subclass of `Exception`, and its class cannot be imported.
    """
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


def described(error: BaseException) -> str:
    """The class and the first line of an unexpected error; a class alone would not help the reader of a refusal."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300].removesuffix(": ")


_REMEDIES: Mapping[int, str] = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose a path on another disk",
    errno.ENOSPC: "free some space on this disk",
    errno.EADDRINUSE: "choose another port",
}


def system_message(error: OSError, *, has_remedy: bool = False) -> str:
    """The file of an error of the system, if it names one, and the reason, with a remedy if requested."""
    reason = reason_of(error) if has_remedy else error.strerror or error
    if error.filename is None:
        return str(reason)
    return f"{error.filename}: {reason}"


def reason_of(error: OSError) -> str:
    """The reason of an error of the system, with the usual remedy."""
    return "; ".join(filter(None, (error.strerror or str(error), _REMEDIES.get(error.errno or 0))))


class EngineError(OrcaError, RuntimeError):
    """The engine cannot continue."""


class EngineDeadError(EngineError):
    """The engine process ended. All open requests fail with this error."""


class ClusterLostError(EngineDeadError):
    """Another process of the cluster was lost, so that all of them end."""


class CompileWhileServingError(EngineError):
    """XLA compiled a program after start-up, although `strict_compile` is set."""
