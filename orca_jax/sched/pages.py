"""Pages of K/V memory: free, held by rows, or kept for what they contain."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Counts the holders of each page, and remembers full pages under the digest of their content.

    A page with holders is never given to anybody else but those who `share` its content. A page that lost its last
    holder is free again; if it is remembered, it is also kept: found and shared until its memory is needed, the least
    recently used one first.

    Args:
        num_pages: pages, named `0..num_pages-1`.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack with the smallest index on top: what was used last is used first, and is warm.
        self._free = list(reversed(range(num_pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # without holders, but remembered; oldest first
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that `take` could give."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int]:
        """Pages for new content, each with one holder."""
        assert count <= self.num_free, f"{count} pages are wanted and {self.num_free} are free"
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
            self._free.append(page)
        pages = self._free[: -count - 1 : -1] if count else []
        del self._free[len(self._free) - count :]
        for page in pages:
            self._holders[page] = 1
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder fewer for each; in the order of their tokens, so that a prefix outlives what followed it."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} has no holder"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digest_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int, digest: bytes) -> None:
        """The page is full, and its content and all before it have this digest; the first one to say so counts."""
        assert self._holders[page], f"page {page} has no holder"
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Pages that hold the content of these digests, up to the first one that is not remembered."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_kept(self, pages: Sequence[int]) -> int:
        """How many of these pages `share` would take from the free ones."""
        return sum([not self._holders[page] for page in pages])

    def num_held_once(self, pages: Sequence[int]) -> int:
        """How many of these pages have a single holder."""
        return sum([self._holders[page] == 1 for page in pages])

    def share(self, pages: Sequence[int]) -> None:
        """One holder more for each of these pages, which `find` has just found."""
        for page in pages:
            if not self._holders[page]:
                del self._kept[page]
            self._holders[page] += 1

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that `held`, all pages of all rows, is what was given. Raises AssertionError."""
        counts = Counter(held)
        wrong = [page for page in range(self.num_pages) if counts[page] != self._holders[page]]
        assert not wrong, f"holders of pages {wrong[:10]} are not those that were counted"
        idle = sorted([*self._free, *self._kept])
        assert idle == [page for page in range(self.num_pages) if not counts[page]], "free and held are not all pages"
        assert all(page in self._digest_of for page in self._kept), "a page is kept and has no content"
        assert not any(page in self._digest_of for page in self._free), "a page is free and remembered"
        assert {digest: page for page, digest in self._digest_of.items()} == self._page_of, "digests and pages differ"
