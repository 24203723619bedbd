"""Accelerators by their published peak rates, and devices as a user names them."""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.checks import did_you_mean
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named

GIB = 2**30
MAX_DEVICES = 16_384  # more than any slice or cluster of one server


class Accelerator(NamedTuple):
    """One device of JAX: a GPU, a chip of a TPU, or one of the two cores of a TPU7x chip."""

    platform: Literal["gpu", "tpu", "cpu"]
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes per second
    flops: float  # per second, in products of bfloat16 without sparsity
    link: float  # to devices of the same host or slice, in one direction, bytes per second
    per_host: int  # devices of the largest usual host alone
    source: str
    cores: int = 1  # TensorCores, which names of Google Cloud such as v5p-8 count
    # devices of each host of a slice of several hosts; 0: as many as a host alone
    per_slice_host: int = 0
    device_kind: str = ""  # JAX's name, of kinds whose slices have rules

    def num_hosts(self, devices: int) -> int:
        """Return the number of hosts of this many devices."""
        if devices <= self.per_host:
            return 1
        return ceil_div(devices, self.per_slice_host or self.per_host)


ACCELERATORS: Mapping[str, Accelerator] = {
    "a100-40": Accelerator(
        "gpu", 40 * GIB, 1.555e12, 312e12, 300e9, 8, "NVIDIA A100 data sheet, SXM4 40 GB"
    ),
    "a100-80": Accelerator(
        "gpu", 80 * GIB, 2.039e12, 312e12, 300e9, 8, "NVIDIA A100 data sheet, SXM4 80 GB"
    ),
    "h100": Accelerator(
        "gpu", 80 * GIB, 3.35e12, 989.4e12, 450e9, 8, "NVIDIA H100 data sheet, SXM5"
    ),
    "a10": Accelerator("gpu", 24 * GIB, 600e9, 125e12, 32e9, 8, "NVIDIA A10 data sheet"),
    "b200": Accelerator("gpu", 180e9, 8e12, 2250e12, 900e9, 8, "NVIDIA HGX B200 data sheet"),
    "l4": Accelerator("gpu", 24 * GIB, 300e9, 121e12, 32e9, 8, "NVIDIA L4 data sheet"),
    "l40s": Accelerator("gpu", 48 * GIB, 864e9, 362e12, 32e9, 8, "NVIDIA L40S data sheet"),
    "rtx4090": Accelerator(
        "gpu", 24 * GIB, 1008e9, 165.2e12, 32e9, 8, "NVIDIA Ada white paper, GeForce RTX 4090"
    ),
    "rtxpro6000": Accelerator(
        "gpu", 96 * GIB, 1792e9, 503.8e12, 64e9, 8, "NVIDIA RTX Blackwell PRO white paper"
    ),
    "t4": Accelerator(
        "gpu",
        16 * GIB,
        320e9,
        65e12,
        16e9,
        8,
        "NVIDIA T4 data sheet; rate of float16, not bfloat16",
    ),
    "h200": Accelerator("gpu", 141e9, 4.8e12, 989.4e12, 450e9, 8, "NVIDIA H200 data sheet, SXM5"),
    "v5e": Accelerator(
        "tpu",
        16 * GIB,
        819e9,
        197e12,
        200e9,
        8,
        "Cloud TPU documentation, v5e",
        1,
        4,
        "TPU v5 lite",
    ),
    "v5p": Accelerator(
        "tpu", 95 * GIB, 2.765e12, 459e12, 600e9, 4, "Cloud TPU documentation, v5p", 2
    ),
    "v6e": Accelerator(
        "tpu",
        32 * GIB,
        1.6e12,
        918e12,
        400e9,
        8,
        "Cloud TPU documentation, v6e",
        1,
        4,
        "TPU v6 lite",
    ),
    "tpu7x": Accelerator(
        "tpu", 96 * GIB, 3.69e12, 1153.5e12, 300e9, 8, "Cloud TPU documentation, TPU7x: half a chip"
    ),
}


def parse_memory(text: str) -> float:
    """Read a number of bytes, such as `24GiB` or `16GB`.

    Raises:
        ConfigError: the text has another form; `param` is "memory".
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(Gi?B)", text)
    if match is None or not float(match[1]):
        raise ConfigError(
            f"memory must be a size such as 24GiB or 16GB, got {text!r}", param="memory"
        )
    return float(match[1]) * (GIB if match[2] == "GiB" else 1e9)


PROMPT_TOKENS = 512  # of the timed prompt, if none is given
ITL_TARGET_MS = 100.0  # most between tokens of a request, likewise


class PeakShares(NamedTuple):
    """Shares of the peak rates that an engine reaches."""

    bandwidth: float = 0.8
    flops: float = 0.6
    link: float = 0.7


class Devices(NamedTuple):
    """A number of equal devices.

    Attributes:
        name: of the kind.
        kind: its rates.
        number: of JAX's devices.
        is_slice: they are one slice of TPUs, whose hosts start one program together; else they may be several.
    """

    name: str
    kind: Accelerator
    number: int
    is_slice: bool = False


def parse_devices(text: str) -> Devices:
    """Read `h200x8`, `v5e-8`, `v7x-8` or `a100-80`.

    `NAMExN` are N devices of JAX. `NAME-N` is a name of Google Cloud, where N counts TensorCores: v5p-8 has 4 devices.
    It is one slice.

    Raises:
        ConfigError: the name or the number is wrong; `param` is "devices".
    """
    name = re.sub("^(tpu-)?v7x", "tpu7x", text.lower()).removeprefix("tpu-")
    if name in ACCELERATORS:
        return Devices(name, ACCELERATORS[name], 1)
    match = re.fullmatch(r"(?P<name>.+)(?P<mark>[x-])(?P<number>\d{1,9})", name)
    known = ", ".join(ACCELERATORS)
    if match is None or match["name"] not in ACCELERATORS:
        hint = did_you_mean(match["name"] if match else name, (*ACCELERATORS, "cpu"))
        message = (
            f"devices must be cpu, NAMExN or NAME-N, with a NAME of {known}, got {text!r}{hint}"
        )
        raise ConfigError(message, param="devices")
    kind = ACCELERATORS[match["name"]]
    number = int(match["number"])
    is_slice = match["mark"] == "-" and platform_named(kind.platform).is_sliced
    cores = kind.cores if match["mark"] == "-" else 1
    if not 1 <= number <= MAX_DEVICES or number % cores:
        least = f"a multiple of {cores}, the cores of a chip, " if cores > 1 else ""
        message = f"devices {text}: the number must be {least}from 1 to {MAX_DEVICES}"
        raise ConfigError(message, param="devices")
    return Devices(match["name"], kind, number // cores, is_slice)
