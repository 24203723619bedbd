"""Pages of prefixes outside of the KV cache: the choice of those to save and of those to read.

Each full page that enters the prefix cache is saved in the background. Before a waiting request gets a row, the pages
that it lacks are read, if reading them should take less time than computing them. They become pages of the prefix
cache like others, and the request finds them there.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Protocol

from orca_jax.sched.blocks import BlockName
from orca_jax.sched.kv import KVManager
from orca_jax.sched.prefixes.cache import NO_HIT, Page
from orca_jax.sched.request import Request, id_bytes
from orca_jax.sched.states import Snapshot
from orca_jax.values.cache_spec import NO_BLOCK

MOST_WAITING = 256  # pages that are saved later
CLOSING_SECONDS = 10.0  # for what the tier has room for
MOST_READINGS = 4  # at once: each takes memory of the host


class Arrivals(Protocol):
    """Pages that are being read."""

    @property
    def is_done(self) -> bool:
        """True if no page is to come."""
        ...

    @property
    def pages(self) -> Mapping[BlockName, Any]:
        """The numbers of the pages found so far."""
        ...


class PageTier(Protocol):
    """Pages outside of the devices, by their names in the prefix cache. Nothing here waits, except for `wait`.

    Snapshots of states have the group after the last one of pages, and the digest of the page at whose end they are.
    """

    def __contains__(self, name: object) -> bool:
        """True if a page is likely to be found."""
        ...

    @property
    def room(self) -> int:
        """The number of pages that may be saved now."""
        ...

    @property
    def num_saved(self) -> int:
        """Pages saved since the start."""
        ...

    @property
    def num_failed(self) -> int:
        """Pages that could not be saved or read."""
        ...

    def call_when_saved(self, function: Callable[[], None]) -> None:
        """Let a thread call a function whenever there is room for more pages."""
        ...

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until all pages are saved, but not longer; False if some are left."""
        ...

    def save(self, pages: Sequence[tuple[BlockName, int, int]]) -> None:
        """Save pages with a name, a depth and a block, as they are after the iterations submitted so far."""
        ...

    def fetch(self, names: Sequence[BlockName]) -> Arrivals:
        """Begin to read pages."""
        ...

    def load(self, pages: Sequence[tuple[BlockName, int, Any]]) -> None:
        """Write pages with a name, a block and numbers, before the next iteration."""
        ...

    def seconds(self, num_pages: int) -> float:
        """The expected time of reading so many pages."""
        ...

    def wait(self, reading: Any, seconds: float) -> None:
        """Wait until a reading is done, but not longer."""
        ...

    def touch(self, names: Sequence[BlockName]) -> None:
        """Make pages the most recently used ones, the last one most of all."""
        ...

    def close(self) -> None:
        """Save what is queued, and end the threads."""
        ...


@dataclass(eq=False, slots=True)
class Sought:
    """The beginning of a request that is being read.

    Attributes:
        request: the first request that asked for it.
        reading: the pages that the prefix cache lacks.
        digests: the digests of all full pages of the beginning.
        names: for each of these pages the names to read, one for each group that lacks it.
        is_over: the pages are in the prefix cache, as far as they were found.
    """

    request: Request
    reading: Arrivals
    digests: Sequence[bytes]
    names: Sequence[Sequence[BlockName]]
    is_over: bool = False


class OuterPages:
    """Saves pages of the prefix cache in a tier, and restores them.

    Args:
        kv: rows and blocks.
        tier: the pages outside.
        seconds_of: the expected time of computing so many tokens of a prompt.

    Attributes:
        num_restored: pages that came back.
    """

    def __init__(self, kv: KVManager, tier: PageTier, seconds_of: Callable[[int], float]) -> None:
        self._kv = kv
        self._tier = tier
        self._seconds_of = seconds_of
        self._new: dict[BlockName, tuple[int, int]] = {}  # depth and block of pages to save
        self._sought: list[Sought] = []
        self._group_of_states = len(kv.groups)
        self.is_on = True
        self.num_restored = 0

    def remembered(self, digest: bytes, depth: int, groups: Sequence[int], row: int) -> None:
        """Note that a full page has entered the prefix cache in some groups."""
        if not self.is_on:
            return
        blocks = self._kv.blocks_of(row)
        for group in groups:
            self._new[group, digest] = depth, blocks[group][depth]

    def kept_state(self, digest: bytes, depth: int) -> None:
        """Note that there is a snapshot of the states at the end of a full page."""
        assert self._kv.states is not None, "the model has no states"
        block = self._kv.states.block_at(digest)
        if self.is_on and block != NO_BLOCK:
            self._new[self._group_of_states, digest] = depth, block

    def save_between(self, requests: Iterable[Request]) -> None:
        """Save new pages if no request computes its prompt, or if many wait: a prompt has the machine for itself."""
        if not self._new:
            return
        if len(self._new) > MOST_WAITING or not any([each.num_left > 1 for each in requests]):
            self.save()

    def save(self) -> None:
        """Begin to save new pages, as many as there is room for. Those whose block was taken are lost."""
        room = self._tier.room
        pages: list[tuple[BlockName, int, int]] = []
        for name in list(self._new):
            if len(pages) == room:
                break
            depth, block = self._new.pop(name)
            if name not in self._tier and self._block_of(name) == block:
                pages.append((name, depth, block))
        if pages:
            self._tier.save(pages)

    def awaits(self, request: Request, most: int) -> bool:
        """True if pages of a waiting request are being read; begins to read them at the first call.

        Args:
            request: waits for its row.
            most: tokens that may be found.
        """
        sought: Sought | None = request.sought
        if sought is not None and not sought.is_over:
            return True
        if request.was_sought and not self._has_lost(request):
            return False
        if len(self._sought) >= MOST_READINGS:
            return self._may_be_read(request, most)
        request.sought = self._seek(request, most // self._kv.page_size)
        return request.sought is not None

    def restore(self) -> None:
        """Put the pages that were read into the prefix cache."""
        for sought in [each for each in self._sought if each.reading.is_done]:
            self._sought.remove(sought)
            sought.is_over = True
            if self.is_on:
                self._restore(sought)

    @property
    def num_saved(self) -> int:
        """Pages saved since the start."""
        return self._tier.num_saved

    @property
    def num_failed(self) -> int:
        """Pages that could not be saved or read."""
        return self._tier.num_failed

    @property
    def is_reading(self) -> bool:
        """True if pages are to come."""
        return bool(self._sought)

    def wait(self, seconds: float) -> None:
        """Wait for the pages that come first."""
        if self._sought:
            self._tier.wait(self._sought[0].reading, seconds)

    def used(self, request: Request) -> None:
        """Note the use of the pages of a request that leaves its row: its beginning is kept longest."""
        if not self.is_on or not request.page_digests:
            return
        groups = range(self._group_of_states + 1)
        self._tier.touch(list(product(groups, reversed(request.page_digests))))

    def turn_off(self) -> None:
        """Neither save nor restore any more: the weights are others."""
        self.is_on = False
        self._new.clear()

    def call_when_saved(self, function: Callable[[], None]) -> None:
        """Let a thread call a function whenever `save_between` can save more pages."""
        self._tier.call_when_saved(function)

    def close(self) -> None:
        """Save all pages, as far as a few seconds suffice, and end the threads."""
        self.save()
        while self._new and self._tier.wait_for_room(CLOSING_SECONDS):
            self.save()
        self._tier.close()

    def _has_lost(self, request: Request) -> bool:
        """True if the cache has given up pages of a request since they were sought, and has room for it again.

        So preempted requests are swapped: others take their pages while they wait.
        """
        if not request.last_near or self._block_of((0, request.last_near)) != NO_BLOCK:
            return False
        return not self._kv.needed(NO_HIT, request.num_tokens) > self._kv.num_free_blocks

    def _may_be_read(self, request: Request, most: int) -> bool:
        """True if the first page of a request is outside alone: it waits for its turn."""
        if most < self._kv.page_size:
            return False
        name = 0, request.digests(self._kv.page_size, 1)[0]
        return self._kv.prefixes.block_of(name) == NO_BLOCK and name in self._tier

    def _seek(self, request: Request, most_pages: int) -> Sought | None:
        """Begin to read the lacking pages of a request if it saves time, or join the reading of another request."""
        request.was_sought = True
        if not self.is_on:
            return None
        page_size = self._kv.page_size
        digests = request.digests(page_size, most_pages)
        count = self._num_known(digests, self._tier)
        num_near = self._num_known(digests)
        request.last_near = b"".join(digests[:num_near][-1:])
        if count <= num_near:
            return None
        digests = digests[:count]
        for other in self._sought:
            if other.digests[-1] in digests:
                request.was_sought = False  # the rest follows
                return other
        lacking = self._lacking(digests)
        names = list(chain.from_iterable(lacking))
        tokens = (count - num_near) * page_size
        if self._tier.seconds(len(names)) >= self._seconds_of(tokens):
            return None
        sought = Sought(request, self._tier.fetch(names), digests, lacking)
        self._sought.append(sought)
        return sought

    def _num_known(self, digests: Sequence[bytes], others: Container[BlockName] = ()) -> int:
        """The number of full pages to begin with, up to a snapshot if the model has states.

        Args:
            digests: the digests of full pages, in order.
            others: names outside of the cache that count too.
        """
        prefixes = self._kv.prefixes
        states = self._kv.states
        most = prefixes.num_full(digests, others)
        if states is None:
            return most
        for count in range(most, 0, -1):
            digest = digests[count - 1]
            is_kept = states.block_at(digest) != NO_BLOCK
            if not is_kept and (self._group_of_states, digest) not in others:
                continue
            if prefixes.num_full(digests[:count], others) == count:
                return count
        return 0

    def _block_of(self, name: BlockName) -> int:
        """The block with a name in the prefix cache; `NO_BLOCK` if there is none."""
        if name[0] < self._group_of_states:
            return self._kv.prefixes.block_of(name)
        assert self._kv.states is not None, "the model has no states"
        return self._kv.states.block_at(name[1])

    def _lacking(self, digests: Sequence[bytes]) -> list[list[BlockName]]:
        """For each page the names of the groups that need it and lack it."""
        kv = self._kv
        end = len(digests) * kv.page_size
        lacking: list[list[BlockName]] = [[] for _ in digests]
        for group, layers in enumerate(kv.groups):
            first = layers.first_needed(end) // kv.page_size
            for index in range(first, len(digests)):
                name = group, digests[index]
                if self._block_of(name) == NO_BLOCK:
                    lacking[index].append(name)
        of_state = self._group_of_states, digests[-1]
        if kv.states is not None and self._block_of(of_state) == NO_BLOCK:
            lacking[-1].append(of_state)
        return lacking

    def _restore(self, sought: Sought) -> None:
        """Put pages into free blocks, up to the first page without numbers or without room."""
        prefixes = self._kv.prefixes
        numbers = sought.reading.pages
        loaded: list[tuple[BlockName, int, Any]] = []
        # else one of these pages might make room for another one
        held = prefixes.hold(sought.digests)
        for index, names in enumerate(sought.names):
            wanted = [name for name in names if self._block_of(name) == NO_BLOCK]
            of_pages = [name for name in wanted if name[0] != self._group_of_states]
            if any([name not in numbers for name in wanted]) or not prefixes.has_room(of_pages):
                break
            if not wanted:
                continue
            page = self._page(sought, index)
            for name in of_pages:
                block = prefixes.restore(name, page)
                held.append((name[0], block))
                loaded.append((name, block, numbers[name]))
            self._publish(sought.request, page, index, of_pages)
            if len(of_pages) < len(wanted):
                loaded += self._restored_state(page, numbers)
        if loaded:
            self._tier.load(loaded)
            self.num_restored += len(loaded)
        prefixes.let_go(held)

    def _restored_state(
        self, page: Page, numbers: Mapping[BlockName, Any]
    ) -> list[tuple[BlockName, int, Any]]:
        """The name, the block and the numbers of the states at the end of a page; none without a free block."""
        assert self._kv.states is not None, "the model has no states"
        name = self._group_of_states, page.digest
        block = self._kv.states.restore(Snapshot(page.digest, page.digest, b"", page.roots))
        if block == NO_BLOCK:
            return []
        return [(name, block, numbers[name])]

    def _page(self, sought: Sought, index: int) -> Page:
        request = sought.request
        size = self._kv.page_size
        digests = sought.digests
        parent = digests[index - 1] if index else request.first_digest
        ids = id_bytes(request.ids_from(index * size, size))
        return Page(digests[index], parent, ids, frozenset(digests[:1]))

    def _publish(
        self, request: Request, page: Page, index: int, names: Sequence[BlockName]
    ) -> None:
        """Tell the watcher of the prefix cache that it has a page again."""
        watcher = self._kv.prefixes.watcher
        if watcher is None:
            return
        size = self._kv.page_size
        parent = page.parent if index else None
        ids = request.ids_from(index * size, size)
        for group, _ in names:
            salt = request.params.cache_salt
            watcher.stored(page.digest, parent, ids, salt, request.adapter, group)
