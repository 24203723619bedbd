"""Pages of the KV cache: free, held by rows, or kept in the prefix cache."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from orca_jax.request import Adapter


class CacheWatcher(Protocol):
    """Receives the changes of the prefix cache, in order, in the engine's thread: calls must be short."""

    def stored(
        self, digest: bytes, parent: bytes | None, ids: Sequence[int], salt: str, adapter: Adapter | None
    ) -> None:
        """A full page can be found from now on.

        Args:
            digest: the digest of the page and of all content before it.
            parent: the digest of the page before it; None for the first page of a prompt.
            ids: the ids of its tokens.
            salt: the salt of the request; pages with different salts are never shared.
            adapter: the adapter of the request; pages with different adapters are never shared.
        """
        ...

    def removed(self, digest: bytes) -> None:
        """A page can no longer be found."""
        ...


class PagePool:
    """Counts the holders of each page, and remembers full pages by the digest of their content.

    A page with holders gets another one only by `share`, for the same content. A page without holders is free. If
    it is remembered, it is also kept: it can be found and shared until its memory is needed. The least recently used
    page is taken first.

    Args:
        num_pages: pages, numbered `0..num_pages-1`.

    Attributes:
        watcher: gets each removal of a digest; None for no watcher.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.watcher: CacheWatcher | None = None
        # A stack with the smallest index on top: the page used last is reused first, while it is warm.
        self._free = list(reversed(range(num_pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # without holders, but remembered; oldest first
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._root_of: dict[int, bytes] = {}  # digest of the first page of its content

    @property
    def num_free(self) -> int:
        """The number of pages available to `take`."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int]:
        """Take pages for new content, each with one holder."""
        assert count <= self.num_free, f"{count} pages are requested and {self.num_free} are free"
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            self._erase(page)
            self._free.append(page)
        pages = self._free[: -count - 1 : -1] if count else []
        del self._free[len(self._free) - count :]
        for page in pages:
            self._holders[page] = 1
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove one holder from each of a row's pages, in order; a prefix is kept longer than its continuation."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} has no holder"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digest_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int, digest: bytes, root: bytes) -> bool:
        """Record the digest of a full page and of all content before it; the first page with a digest counts.

        `root` is the digest of the first page of this content. Returns True if the digest is new.
        """
        assert self._holders[page], f"page {page} has no holder"
        if digest in self._page_of or page in self._digest_of:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self._root_of[page] = root
        return True

    def forget(self, root: bytes) -> None:
        """Erase the digests of all pages with this root. Kept ones become free; holders keep theirs, unfindable."""
        for page in [page for page, its_root in self._root_of.items() if its_root == root]:
            self._erase(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def forget_all(self) -> None:
        """Erase all digests. Kept pages become free; holders keep theirs, unfindable."""
        for page in list(self._digest_of):
            self._erase(page)
        self._free += reversed(self._kept)
        self._kept.clear()

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Pages with the content of these digests, up to the first unknown digest."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_kept(self, pages: Sequence[int]) -> int:
        """The number of these pages without a holder; `share` takes them from the free ones."""
        return sum([not self._holders[page] for page in pages])

    def num_held_once(self, pages: Sequence[int]) -> int:
        """The number of these pages with a single holder."""
        return sum([self._holders[page] == 1 for page in pages])

    def share(self, pages: Sequence[int]) -> None:
        """Add one holder to each of these pages, directly after `find`."""
        for page in pages:
            if not self._holders[page]:
                del self._kept[page]
            self._holders[page] += 1

    def _erase(self, page: int) -> None:
        digest = self._digest_of.pop(page)
        del self._page_of[digest], self._root_of[page]
        if self.watcher is not None:
            self.watcher.removed(digest)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that `held`, the pages of all rows, agrees with the counts. Raises AssertionError."""
        counts = Counter(held)
        wrong = [page for page in range(self.num_pages) if counts[page] != self._holders[page]]
        assert not wrong, f"holders of pages {wrong[:10]} are not those that were counted"
        idle = sorted([*self._free, *self._kept])
        assert idle == [page for page in range(self.num_pages) if not counts[page]], "free and held are not all pages"
        assert all(page in self._digest_of for page in self._kept), "a page is kept and has no content"
        assert not any(page in self._digest_of for page in self._free), "a page is free and remembered"
        assert {digest: page for page, digest in self._digest_of.items()} == self._page_of, "digests and pages differ"
        assert self._root_of.keys() == self._digest_of.keys(), "roots and digests differ"
