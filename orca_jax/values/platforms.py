"""The table of what differs between the platforms of JAX. Other code reads these attributes, and compares no names."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from orca_jax.values.config import DType, PageLayout


class HasPlatform(Protocol):
    """A device of JAX."""

    platform: str


class Platform(NamedTuple):
    """The attributes of a platform. The defaults are those of an accelerator.

    Attributes:
        name: JAX's.
        is_host: the devices are the processors of this machine, and use its memory.
        is_sliced: devices are sold in slices, whose hosts start one program.
        shares_memory: other processes may use the device; JAX takes a part of its memory.
        splits_within_host: links between hosts are too slow for tensor parallelism.
        dtype: of weights and activations by default.
        page_layout: the order of tokens in a page.
        converts_pages: attention converts other types than float32 in each product, so pages are float32.
        has_tiles: arrays are stored in tiles. Pages cannot be viewed in another shape without a copy, and a weight may
            have another order of axes in memory.
        scans_in_place: a scan over layers does not copy their weights.
        switches_layers: layers that are not scanned have one body with a switch.
        copies_pools: XLA copies a pool for each layer of one body, unless one layer ends before the next one writes.
        waits_at_branches: at each branch of a program the device waits for its host.
        has_multiprocessors: the device tells the number of its multiprocessors.
        largest_launch: the most tokens of one launch by default.
        least_launch: the smallest default of that.
        doubles_launches: few sizes of launches are compiled, each twice the one before, since compiling is slow.
        itl_target_ms: the target for the time between two tokens, in milliseconds.
        options: of XLA.
    """

    name: str
    is_host: bool = False
    is_sliced: bool = False
    shares_memory: bool = False
    splits_within_host: bool = False
    dtype: DType = "bfloat16"
    page_layout: PageLayout = "token_major"
    converts_pages: bool = False
    has_tiles: bool = False
    scans_in_place: bool = False
    switches_layers: bool = False
    copies_pools: bool = False
    waits_at_branches: bool = False
    has_multiprocessors: bool = False
    largest_launch: int = 2048
    least_launch: int = 512
    doubles_launches: bool = False
    itl_target_ms: float = 100.0
    options: Mapping[str, bool | int | str] = {}


_KNOWN = (
    Platform(
        "cpu",
        is_host=True,
        dtype="float32",
        page_layout="head_major",
        converts_pages=True,
        switches_layers=True,
        copies_pools=True,
        largest_launch=512,
        least_launch=128,
        doubles_launches=True,
        itl_target_ms=250.0,  # four tokens a second, the speed of reading
    ),
    Platform(
        "gpu",
        shares_memory=True,
        splits_within_host=True,
        waits_at_branches=True,
        has_multiprocessors=True,
        # XLA counts the pages of the KV cache three times, because it does not see that they are updated in place.
        # From some 34 GB of pages on an H200 on, memory seems short to XLA, and every layer repeats the computations
        # shared by all layers: 618 launches a step instead of 468 for Llama-3-8B. The factor, in percent, puts the
        # limit far above.
        options={"xla_gpu_memory_limit_slop_factor": 1000},
    ),
    Platform("tpu", is_sliced=True, has_tiles=True, scans_in_place=True),
)
PLATFORMS: Mapping[str, Platform] = {platform.name: platform for platform in _KNOWN}
"""The platforms by their names."""


def platform_named(name: str) -> Platform:
    """Return the platform of a name of JAX; an unknown one is that of an accelerator."""
    return PLATFORMS.get(name) or Platform(name)


def platform_of(device: HasPlatform) -> Platform:
    """Return the platform of a device."""
    return platform_named(device.platform)
