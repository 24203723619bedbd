"""Accelerators by their published peak rates, and the shares of them that an engine reaches."""

from typing import NamedTuple

GIB = 1 << 30
USABLE = 0.9
"""The share of a device's memory for weights, keys and values and activations; the rest is the runtime's."""


class Device(NamedTuple):
    """One device: a GPU, or a chip of a TPU."""

    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops: float  # operations per second in bfloat16 or float16, without sparsity
    source: str


DEVICES: dict[str, Device] = {
    "a100-40": Device(40 * GIB, 1.555e12, 312e12, "NVIDIA A100 data sheet, SXM4 40 GB"),
    "a100-80": Device(80 * GIB, 2.039e12, 312e12, "NVIDIA A100 data sheet, SXM4 80 GB"),
    "h100": Device(80 * GIB, 3.35e12, 989.4e12, "NVIDIA H100 data sheet, SXM5"),
    "h200": Device(141e9, 4.8e12, 989.4e12, "NVIDIA H200 data sheet, SXM5"),
    "tpu-v5e": Device(16 * GIB, 0.819e12, 197e12, "Cloud TPU documentation, v5e"),
    "tpu-v5p": Device(95 * GIB, 2.765e12, 459e12, "Cloud TPU documentation, v5p"),
    "tpu-v6e": Device(32 * GIB, 1.640e12, 918e12, "Cloud TPU documentation, v6e"),
    "tpu7x": Device(192 * GIB, 7.380e12, 2307e12, "Cloud TPU documentation, TPU7x"),
}


class Efficiency(NamedTuple):
    """The shares of the peak rates that an engine reaches with one model."""

    memory: float  # of the bandwidth, while weights, keys and values are read
    compute: float  # of the operations, in products of matrices
