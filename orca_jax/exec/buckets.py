"""Shapes of programs: buckets (the token counts T of the layers), widths of samplers, and the cut into launches."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orca_jax.values.step import Member

_MIN_WIDTH = 8  # of the smallest samplers
_FINE = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_COARSE = (1, 8, 32, 128)
_MIN_LARGEST_WIDTH = 64


def default_buckets(largest: int, *, skips_padding: bool = False) -> tuple[int, ...]:
    """Token counts up to `largest`, a third to a half apart. So at most a third of a large bucket is padding.

    Programs with products that skip padding are few: their sizes are four times apart.
    """
    sizes = set(_COARSE if skips_padding else _FINE)
    size = _FINE[-1]
    while size < largest and skips_padding:
        size *= 4
        sizes.add(size)
    while size < largest:
        sizes |= {size + size // 2, 2 * size}
        size *= 2
    return (*sorted(size for size in sizes if size < largest), largest)


def measured_sizes(buckets: Sequence[int], *, skips_padding: bool) -> tuple[int, ...]:
    """Token counts of the launches that are measured: those of buckets, and doubles between them if padding is free."""
    if not skips_padding:
        return tuple(buckets)
    doubled = {2**power for power in range(buckets[0].bit_length(), buckets[-1].bit_length())}
    return tuple(sorted({*buckets, *doubled}))


def bucket_for(buckets: Sequence[int], num_tokens: int) -> int:
    """The smallest bucket of `num_tokens` or more. `num_tokens` must not exceed the largest one."""
    return buckets[bisect_left(buckets, num_tokens)]


def sampler_width(num_draws: int) -> int:
    """Places of the largest samplers: one for each draw of a launch, and enough to score a prompt in few launches."""
    return max(num_draws, _MIN_LARGEST_WIDTH)


def sampler_widths(num_draws: int, *, can_skip: bool = False) -> tuple[int, ...]:
    """Widths of the plain samplers, doubled up to the largest: unembedding 64 rows takes GPT-2 twice as long as 16.

    Those that skip places not in use have the largest width alone, and 1, since they draw groups of places.
    """
    largest = sampler_width(num_draws)
    if can_skip and largest > _MIN_WIDTH:
        return (1, largest)
    sizes = [_MIN_WIDTH]
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return (*sizes, largest)


class Segment(NamedTuple):
    """Consecutive tokens of one member: `size` of them, the first at `offset`."""

    member: int  # index in the plan
    offset: int
    size: int


def launches(members: Sequence[Member], largest: int, most_scored: int) -> Iterator[list[Segment]]:
    """Cut an iteration into device launches of at most `largest` tokens each.

    Algorithm 1 puts no bound on the tokens of an iteration, but compiled shapes are finite. If a member does
    not fit in a launch, the next one continues with its tokens, and reads the keys and values written before. Members
    with one token come first in each launch. The attention kernels depend on this order.

    Members with targets, and those whose hidden vectors are added up, get their own launches, of at most
    `most_scored` tokens (the largest width of a sampler), because every token there is kept.
    """
    scored = [
        i for i, member in enumerate(members) if member.targets or member.pools in ("sum", "mean")
    ]
    if not scored:
        yield from _cut(members, range(len(members)), largest)
        return
    own = set(scored)
    yield from _cut(members, [index for index in range(len(members)) if index not in own], largest)
    yield from _cut(members, scored, min(largest, most_scored))


def _cut(
    members: Sequence[Member], indices: Sequence[int], largest: int
) -> Iterator[list[Segment]]:
    launch: list[Segment] = []
    room = largest
    sizes = [(index, members[index].num_tokens) for index in indices]
    sizes = [each for each in sizes if each[1] == 1] + [each for each in sizes if each[1] > 1]
    if sizes and sum([size for _, size in sizes]) <= largest:  # nearly all
        yield [Segment(index, 0, size) for index, size in sizes]
        return
    for index, left in sizes:
        offset = 0
        while left:
            size = min(left, room)
            launch.append(Segment(index, offset, size))
            offset = offset + size
            left = left - size
            room = room - size
            if not room:
                yield _increments_first(launch)
                launch = []
                room = largest
    if launch:
        yield _increments_first(launch)


def _increments_first(launch: list[Segment]) -> list[Segment]:
    """Put a segment of one token before longer ones. A cut can leave one at the end only."""
    if launch[-1].size > 1 or launch[-2:][0].size == 1:
        return launch
    return sorted(launch, key=lambda segment: segment.size > 1)
