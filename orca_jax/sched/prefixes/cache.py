"""The prefix cache: pages of earlier and of running requests, found by their content in each group of layers.

A page is `page_size` tokens of a prompt, or fewer at its end. Its digest covers all tokens from the first one on. A row
begins with the blocks of equal full pages. The page after them may be equal at its beginning only: then the row copies
it, and continues from there.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

from orca_jax.sched.blocks import BlockName, BlockPool
from orca_jax.sched.prefixes.lost import LostPages
from orca_jax.sched.states import States
from orca_jax.values.cache_spec import NO_BLOCK, LayerGroup
from orca_jax.values.lora_request import Adapter
from orca_jax.values.step import DIGEST_BYTES, VectorSpan

ID_BYTES = 4
SPAN_MARK = b"\xff" * ID_BYTES  # ids are below 2**31, so their bytes have no such run
SPAN_BYTES = len(SPAN_MARK) + DIGEST_BYTES + ID_BYTES
WORTH_A_COPY = 16  # tokens that a copy must save, unless it saves all of the prompt but one


class CacheWatcher(Protocol):
    """Receives the changes of the prefix cache, in order, in the engine's thread: calls must be short."""

    def stored(
        self,
        digest: bytes,
        parent: bytes | None,
        ids: Sequence[int],
        salt: str,
        adapter: Adapter | None,
        group: int,
    ) -> None:
        """A full page can be found from now on.

        Args:
            digest: the digest of the page and of all content before it.
            parent: the digest of the page before it; None for the first page of a prompt.
            ids: the ids of its tokens.
            salt: the salt of the request; pages with different salts are never shared.
            adapter: the adapter of the request; pages with different adapters are never shared.
            group: the group of layers, see `values/cache_spec.py`.
        """
        ...

    def removed(self, digest: bytes, group: int) -> None:
        """A full page can no longer be found."""
        ...


class Page(NamedTuple):
    """The content of a page.

    Attributes:
        digest: the digest of its tokens and of all before them.
        parent: the digest of the page before it, or of salt and adapter.
        ids: its tokens as bytes, see `with_spans`.
        roots: digests of the first pages that its content was computed from; wrong values spread along them.
        is_full: False for the last page of a prompt or a text.
    """

    digest: bytes
    parent: bytes
    ids: bytes
    roots: frozenset[bytes]
    is_full: bool = True


class Hit(NamedTuple):
    """What the prefix cache has of a prompt.

    Attributes:
        num_tokens: tokens that need not be computed.
        blocks: blocks of full pages, by group; `NO_BLOCK` before a window.
        sources: a block of each group to copy, for the tokens after the full pages; () if there are none.
        state: the block of recurrent states after these tokens; `NO_BLOCK` if the model has none.
    """

    num_tokens: int = 0
    blocks: tuple[Sequence[int], ...] = ()
    sources: tuple[int, ...] = ()
    state: int = NO_BLOCK

    def reuses(self, blocks: Sequence[Sequence[int]]) -> bool:
        """True if the hit has a block among these of a row, by group."""
        of_pages = any(
            {*mine}.intersection(each) - {NO_BLOCK}
            for mine, each in zip(self.blocks, blocks, strict=False)
        )
        return of_pages or any(
            source in each for source, each in zip(self.sources, blocks, strict=False)
        )

    def without_copy(self, page_size: int) -> "Hit":
        """The full pages alone; nothing if the model has states, since the one found is good at another position."""
        if self.state != NO_BLOCK:
            return NO_HIT
        num_pages = len(self.blocks[0])
        if num_pages:
            return Hit(num_pages * page_size, self.blocks)
        return NO_HIT


NO_HIT = Hit()


class PrefixCache:
    """Names blocks by group and content. Its pools keep named blocks until their memory is needed.

    Args:
        pools: the pools of each group; the cache gives names in them, and must get those of the blocks that they take.
        groups: the groups of layers.
        page_size: tokens of a full page.
        states: the states of a model with recurrent layers; a hit then ends at a snapshot.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        groups: Sequence[LayerGroup],
        page_size: int,
        states: States | None = None,
    ) -> None:
        self.watcher: CacheWatcher | None = None
        self.lost: LostPages | None = None
        self._pools = pools
        self._page_size = page_size
        self._states = states
        self._full = [index for index, group in enumerate(groups) if group.window is None]
        self._windows = [
            (index, group) for index, group in enumerate(groups) if group.window is not None
        ]
        self._blocks: list[dict[bytes, int]] = [{} for _ in groups]  # by digest, for each group
        self._pages: dict[bytes, Page] = {}  # by digest
        # For each parent, the pages after it that all groups have, as (ids, digest), sorted: the longest common
        # beginning is that with a neighbour.
        self._following: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)

    def keep_lost(self) -> None:
        """Keep in mind the pages evicted from now on."""
        self.lost = LostPages()

    def remember(self, blocks: Sequence[int], page: Page) -> Sequence[int]:
        """Name the blocks of a page, one for each group; the first block with a content counts.

        A block may have had the beginning of this page as its name; it gets the new one.

        Returns:
            The groups in which the content is new.
        """
        new = []
        for group, block in enumerate(blocks):
            if block == NO_BLOCK:
                continue
            name = self._pools[group].name_of(block)
            if name is not None:
                if name[1] == page.digest or self._pages[name[1]].is_full:
                    continue
                self._erase(name)
            if page.digest not in self._blocks[group]:
                self._blocks[group][page.digest] = block
                self._pools[group].give_name(block, (group, page.digest))
                new.append(group)
        if new:
            known = self._pages.get(page.digest)
            self._pages[page.digest] = (
                page if known is None else page._replace(roots=page.roots | known.roots)
            )
            if self._is_whole(page.digest):
                insort(self._following[page.parent], (page.ids, page.digest))
        return new

    def find(
        self,
        digests: Sequence[bytes],
        start: bytes,
        most: int,
        ids: Callable[[int], bytes],
        shared: int = 0,
    ) -> Hit:
        """The longest beginning of a prompt in the cache.

        Args:
            digests: the digests of the request's full pages, in order.
            start: the digest before the first one, of salt and adapter.
            most: tokens that may be found.
            ids: returns the tokens from a position on, as bytes, up to `most` and to the end of a page.
            shared: tokens that other requests have, too: a copy up to them or further is worth it.
        """
        count = self.num_full(digests)
        if self._states is not None:
            return self._at_snapshot(self._states, digests[:count], start, ids)
        parent = digests[count - 1] if count else start
        source, num_copied = b"", 0
        if parent in self._following:
            source, num_copied = self._inside(parent, count, most, ids, shared)
        if not count and not num_copied:
            return NO_HIT
        return self._hit(digests[:count], num_copied, source)

    def _hit(
        self, found: Sequence[bytes], num_copied: int, source: bytes, state: int = NO_BLOCK
    ) -> Hit:
        """The hit of these full pages, and of tokens to copy from another one."""
        count = len(found)
        size = self._page_size
        blocks: list[Sequence[int]] = [()] * len(self._blocks)
        for group in self._full:
            named = self._blocks[group]
            blocks[group] = [named[digest] for digest in found]
        for group, layers in self._windows:
            named = self._blocks[group]
            first = layers.first_needed(count * size) // size
            blocks[group] = [NO_BLOCK] * first + [named[digest] for digest in found[first:]]
        sources = tuple([named[source] for named in self._blocks]) if num_copied else ()
        return Hit(count * size + num_copied, tuple(blocks), sources, state)

    def _at_snapshot(
        self, states: States, found: Sequence[bytes], start: bytes, ids: Callable[[int], bytes]
    ) -> Hit:
        """The hit that ends at the longest snapshot within these pages, or within the one after them."""
        for count in range(len(found), -1, -1):
            parent = found[count - 1] if count else start
            if not states.follows(parent):
                continue
            if any([self._with_window(*group, found, count) < count for group in self._windows]):
                continue
            for begun, state in states.find(parent, ids(count * self._page_size), ID_BYTES):
                source = self._page_with(parent, begun)
                if source or not begun:
                    return self._hit(found[:count], _num_tokens(begun), source, state)
        return NO_HIT

    def _page_with(self, parent: bytes, begun: bytes) -> bytes:
        """A page after `parent` that begins with these ids, in all groups; b"" if there is none."""
        following = self._following.get(parent, ())
        place = bisect_left(following, (begun, b""))
        if begun and following[place:] and following[place][0].startswith(begun):
            return following[place][1]
        return b""

    def hold(self, digests: Iterable[bytes]) -> list[tuple[int, int]]:
        """Hold the blocks of some pages, so that they make no room; their groups and numbers, for `let_go`."""
        held: list[tuple[int, int]] = []
        for digest in digests:
            for group, named in enumerate(self._blocks):
                block = named.get(digest)
                if block is not None:
                    self._pools[group].share((block,))
                    held.append((group, block))
        return held

    def let_go(self, held: Sequence[tuple[int, int]]) -> None:
        """Give back blocks that were held, in the order of their pages."""
        for group, pool in enumerate(self._pools):
            pool.give_back([block for each, block in held if each == group])

    def has_room(self, names: Iterable[BlockName]) -> bool:
        """True if there are blocks for new content of these names."""
        needed = Counter([self._pools[group] for group, _ in names])
        return all([pool.num_free >= number for pool, number in needed.items()])

    def restore(self, name: BlockName, page: Page) -> int:
        """Take a block for a page in one group, and give it the name; its content follows. The caller holds it."""
        group, _ = name
        (block,) = self._pools[group].take_blocks(1)
        blocks = [NO_BLOCK] * len(self._blocks)
        blocks[group] = block
        self.remember(blocks, page)
        return block

    def roots_of(self, hit: Hit) -> frozenset[bytes]:
        """The roots of all pages of a hit, directly after `find`."""
        found: set[bytes] = set()
        for group, pool in enumerate(self._pools):
            for block in (*hit.blocks[group], *hit.sources[group : group + 1]):
                name = None if block == NO_BLOCK else pool.name_of(block)
                if name is not None:
                    found |= self._pages[name[1]].roots
        if self._states is not None:
            found |= self._states.roots_of(hit.state)
        return frozenset(found)

    def forget(self, roots: frozenset[bytes]) -> None:
        """Erase all pages with one of these roots. Kept blocks become free; holders keep theirs, unfindable."""
        for page in [page for page in self._pages.values() if page.roots & roots]:
            self._erase_page(page)
        if self._states is not None:
            self._states.forget(roots)

    def forget_all(self) -> None:
        """Erase all pages. Kept blocks become free; holders keep theirs, unfindable."""
        for page in list(self._pages.values()):
            self._erase_page(page)
        if self._states is not None:
            self._states.forget(None)

    def taken(self, name: BlockName) -> None:
        """Erase the content of a block that its pool takes for a new one."""
        group, digest = name
        page = self._pages[digest]
        if self._is_whole(digest):
            following = self._following[page.parent]
            del following[bisect_left(following, (page.ids, digest))]
            if not following:
                del self._following[page.parent]
        del self._blocks[group][digest]
        if not any([digest in named for named in self._blocks]):
            del self._pages[digest]
        if page.is_full and self.lost is not None:
            self.lost.add_page(digest)
        if page.is_full and self.watcher is not None:
            self.watcher.removed(digest, group)

    def block_of(self, name: BlockName) -> int:
        """The block with a name; `NO_BLOCK` if there is none."""
        group, digest = name
        return self._blocks[group].get(digest, NO_BLOCK)

    def num_full(self, digests: Sequence[bytes], others: Container[BlockName] = ()) -> int:
        """The number of full pages to begin with: those of the groups with all tokens, as far as windows have them.

        Args:
            digests: the digests of full pages, in order.
            others: names of pages that count too.
        """
        count = len(digests)
        for group in self._full:
            named = self._blocks[group]
            for place in range(count):
                digest = digests[place]
                if digest not in named and (group, digest) not in others:
                    count = place
                    break
        before = -1
        # one group may have shortened what another one has
        while self._windows and count != before:
            before = count
            for group, layers in self._windows:
                count = self._with_window(group, layers, digests, count, others)
        return count

    def _with_window(
        self,
        group: int,
        layers: LayerGroup,
        digests: Sequence[bytes],
        count: int,
        others: Container[BlockName] = (),
    ) -> int:
        """The largest number of pages up to `count` whose last ones, as far as the window reaches, are in the cache."""
        named = self._blocks[group]
        place = count
        while place > layers.first_needed(count * self._page_size) // self._page_size:
            place -= 1
            digest = digests[place]
            if digest not in named and (group, digest) not in others:
                count = place
        return count

    def _inside(
        self, parent: bytes, count: int, most: int, ids: Callable[[int], bytes], shared: int
    ) -> tuple[bytes, int]:
        """The page after `count` full ones with the longest common beginning, and its tokens; 0 if not worth a copy."""
        wanted = ids(count * self._page_size)
        following = self._following[parent]
        place = bisect_left(following, (wanted, b""))
        neighbours = following[max(0, place - 1) : place + 1]
        num_common, source = max(
            [(_num_common(wanted, each), digest) for each, digest in neighbours]
        )
        end = count * self._page_size + num_common
        is_rest = end == most or 0 < shared <= end
        if num_common >= WORTH_A_COPY or (num_common and is_rest):
            return source, num_common
        return (b"", 0)

    def _is_whole(self, digest: bytes) -> bool:
        return all([digest in named for named in self._blocks])

    def _erase(self, name: BlockName) -> None:
        group, digest = name
        self._pools[group].take_name(self._blocks[group][digest])
        self.taken(name)

    def _erase_page(self, page: Page) -> None:
        for group, named in enumerate(self._blocks):
            if page.digest in named:
                self._erase((group, page.digest))

    def check_integrity(self) -> None:
        """Assert that names, pages and the index agree, and the snapshots too. Raises AssertionError."""
        if self._states is not None:
            self._states.check_integrity()
        for group, named in enumerate(self._blocks):
            for digest, block in named.items():
                assert self._pools[group].name_of(block) == (group, digest), (
                    f"block {block} has another name"
                )
                assert digest in self._pages, f"the content of block {block} is unknown"
        whole = sorted(
            (page.parent, page.ids, digest)
            for digest, page in self._pages.items()
            if self._is_whole(digest)
        )
        listed = []
        for parent, following in sorted(self._following.items()):
            listed += [(parent, *each) for each in following]
        assert listed == whole, "the index of pages differs from the pages"
        assert self._pages.keys() <= set[bytes]().union(*self._blocks), "a page has no block"


def with_spans(ids: bytes, spans: Sequence[VectorSpan]) -> bytes:
    """Tokens as bytes: each as its id, and the first one of a vector span as a mark, the digest, the length and its id.

    The code of no token begins that of another one. So equal bytes are equal tokens and vectors, and the longest common
    beginning of sorted contents is that with a neighbour. A span that begins before these tokens is in the digest of
    the page before them.
    """
    parts: list[bytes] = []
    done = 0
    for span in spans:
        if span.place >= 0:
            at = span.place * ID_BYTES
            parts += [
                ids[done:at],
                SPAN_MARK,
                span.digest,
                span.length.to_bytes(ID_BYTES, "little"),
            ]
            done = at
    return b"".join([*parts, ids[done:]])


def _num_tokens(content: bytes) -> int:
    """The number of tokens whose codes are complete in a beginning of a content."""
    count = 0
    at = 0
    while (mark := content.find(SPAN_MARK, at)) >= 0:
        count += (mark - at) // ID_BYTES
        at = mark + SPAN_BYTES
    return count + max(0, len(content) - at) // ID_BYTES


def _num_common(one: bytes, other: bytes) -> int:
    """The number of equal tokens at the beginning of both."""
    if one[:ID_BYTES] != other[:ID_BYTES]:
        return 0  # nearly always
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return _num_tokens(one[:size])
    differing = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return _num_tokens(one[: ((differing & -differing).bit_length() - 1) // 8])
