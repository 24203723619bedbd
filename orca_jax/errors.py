"""Every error that this package raises on purpose.

    OrcaError
    ├── ConfigError          a flag, an argument or a model's config.json is wrong; names the parameter
    │   └── CheckpointError  weights that do not fit the model; lists every problem at once
    ├── RequestError         one request is wrong; names the field; nothing else is disturbed
    └── EngineError          the engine cannot go on
        ├── EngineDeadError             the engine process ended
        └── CompileWhileServingError    XLA compiled after start-up, and that was declared an error

A user's mistake is a `ConfigError` or a `RequestError` and its message says how to mend it.
Pressure on memory is no error: requests wait.
"""

from collections.abc import Sequence


class OrcaError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(OrcaError, ValueError):
    """A setting is wrong. `param` is the flag or file that has to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class CheckpointError(ConfigError):
    """The weights do not fit the model. `problems` holds one line for each mismatch."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{source} does not fit the model:\n{lines}", param="model")


class RequestError(OrcaError, ValueError):
    """One request is wrong. `param` is the field that has to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class EngineError(OrcaError, RuntimeError):
    """The engine cannot go on."""


class EngineDeadError(EngineError):
    """The engine process ended; open requests fail with this."""


class CompileWhileServingError(EngineError):
    """XLA compiled something after start-up although `strict_compile` was asked for."""
