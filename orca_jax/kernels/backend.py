"""Backends of an operation as a table: a new one is one file and one row.

Each operation has a table of `Backend`, in order of preference. The modules of one table have functions of the same
names. If some backends cannot do all shapes, one of them is `refusal`: it returns None if the backend can do the given
shapes, and otherwise the reason. A module may have `refusal_of_device(device)`, which does the same for a device. A
module is imported at its first use: a program on a CPU does not wait for the import of Pallas.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax


class Backend(NamedTuple):
    """One implementation of an operation, and the devices it is meant for."""

    name: str
    module: str
    platform: str | None = None  # the only one that it is meant for; None: all of them
    # GPUs of which it is the default: the bounds of the first number of CUDA's compute capability, both inclusive.
    least_capability: int = 0
    greatest_capability: int | None = None
    # plain XLA: it needs no self-test, and on accelerators it is slower than a kernel
    is_plain: bool = False

    def load(self) -> Any:
        """The module with its functions."""
        return import_module(self.module)

    def is_meant_for(self, device: jax.Device) -> bool:
        """True if the backend may be the default of this device."""
        if self.platform not in (None, device.platform):
            return False
        capability = _capability(device)
        return self.least_capability <= capability <= (self.greatest_capability or capability)

    def refusal(self, device: jax.Device, *shapes: Any) -> str | None:
        """The reason why the backend cannot do these shapes on this device, or None if it can."""
        reason: str | None = self.load().refusal(*shapes)
        return reason or self.refusal_of_device(device)

    def refusal_of_device(self, device: jax.Device) -> str | None:
        """The reason why the backend must not run on this device, whatever the shapes, or None if it can."""
        refuse = getattr(self.load(), "refusal_of_device", None)
        if refuse is None:
            return None
        return refuse(device)


def named_backend(backends: Sequence[Backend], name: str) -> Backend | None:
    """The backend of this name, or None."""
    return next((backend for backend in backends if backend.name == name), None)


def first_backend(backends: Sequence[Backend], device: jax.Device, *shapes: Any) -> Backend | None:
    """The first backend meant for the device, without a refusal of these shapes; None if there is none."""
    fitting = (backend for backend in backends if backend.is_meant_for(device))
    return next((backend for backend in fitting if backend.refusal(device, *shapes) is None), None)


def refusals(backends: Sequence[Backend], device: jax.Device, *shapes: Any) -> list[str]:
    """The reasons against the backends for the device's platform before the one returned by `first_backend`."""
    reasons = []
    for backend in backends:
        if backend.is_meant_for(device):
            if (reason := backend.refusal(device, *shapes)) is None:
                break
            reasons.append(reason)
        elif backend.platform == device.platform:
            least = backend.least_capability
            greatest = backend.greatest_capability
            bound = f"{least} or more"
            if least == greatest:
                bound = f"{least}"
            elif greatest:
                bound = f"{least} to {greatest}"
            reasons.append(f"{backend.name!r} is for GPUs of compute capability {bound}")
    return reasons


def known_backend(operation: str, backends: Sequence[Backend], name: str) -> Backend:
    """The backend of this name. Raises NotImplementedError if the operation has none."""
    if (found := named_backend(backends, name)) is None:
        names = ", ".join(backend.name for backend in backends)
        raise NotImplementedError(f"{operation} has no implementation {name!r}; use one of {names}")
    return found


def defaults(backends: Sequence[Backend]) -> dict[str | None, Backend]:
    """The first backend of each platform; that of None is for all other platforms."""
    first: dict[str | None, Backend] = {}
    for backend in backends:
        first.setdefault(backend.platform, backend)
    return first


def run_backend[T](
    operation: str,
    backends: Sequence[Backend],
    call: Callable[[Any], T],
    implementation: str | None = None,
) -> T:
    """Trace an operation that all its backends can do on every platform.

    Args:
        operation: its name, for errors.
        backends: its table; the last one that can be a default is meant for all platforms.
        call: traces the operation by the module of a backend.
        implementation: the name of a backend; None takes the default of the platform that the program is compiled for.

    Raises:
        NotImplementedError: there is no backend of this name.
    """
    if implementation is not None:
        return call(known_backend(operation, backends, implementation).load())
    calls = {
        platform or "default": partial(call, backend.load())
        for platform, backend in defaults(backends).items()
    }
    if len(calls) == 1:
        return calls["default"]()
    out: T = jax.lax.platform_dependent(**calls)
    return out


def _capability(device: jax.Device) -> int:
    """The first number of CUDA's compute capability; 0 for all other devices, some of which have words instead."""
    first, _, _ = str(getattr(device, "compute_capability", "")).partition(".")
    if not first.isdigit():
        return 0
    return int(first)
