"""Backends of an operation as a table: a new one is one file and one row.

Each operation has a table of `Backend`, in order of preference. The modules of one table have functions of the same
names; among them is `refusal`, which returns None if the backend can do the given shapes, and the reason otherwise. A
module is imported when it is used: a program on a CPU does not wait for the import of Pallas.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax


class Backend(NamedTuple):
    """One implementation of an operation, and the devices it is meant for."""

    name: str
    module: str
    platform: str | None = None  # the only platform that it runs on; None: all of them
    # GPUs of which it is the default: the bounds of the first number of CUDA's compute capability, both inclusive.
    least_capability: int = 0
    greatest_capability: int | None = None

    def load(self) -> Any:
        """The module with its functions."""
        return import_module(self.module)

    def is_meant_for(self, device: jax.Device) -> bool:
        """True if the backend may be the default of this device."""
        if self.platform not in (None, device.platform):
            return False
        capability = _capability(device)
        return self.least_capability <= capability <= (self.greatest_capability or capability)


def named_backend(backends: Sequence[Backend], name: str) -> Backend | None:
    """The backend of this name, or None."""
    return next((backend for backend in backends if backend.name == name), None)


def first_backend(backends: Sequence[Backend], device: jax.Device, *shapes: Any) -> Backend | None:
    """The first backend that is meant for the device and whose `refusal` of these shapes is None."""
    fitting = (backend for backend in backends if backend.is_meant_for(device))
    return next((backend for backend in fitting if backend.load().refusal(*shapes) is None), None)


def _capability(device: jax.Device) -> int:
    """The first number of CUDA's compute capability; 0 for all other devices, some of which have words instead."""
    first, _, _ = str(getattr(device, "compute_capability", "")).partition(".")
    return int(first) if first.isdigit() else 0
