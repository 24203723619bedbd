"""Ownership of rows, reserved slots and pages."""

from collections.abc import Iterable, Sequence

from orca_jax.errors import ConfigError
from orca_jax.sched.pages import CacheWatcher, PagePool

_NO_PAGES: tuple[int, ...] = ()


class KVManager:
    """The only owner of rows, slots and pages. A request holds slots and pages through its row.

    Verbs come in pairs: `acquire_row`/`release_row`, `reserve`/`release` for slots, `allocate`/`free` for pages.

    With `n_slots`, a row reserves slots, one per token: the paper's `n_rsrv`. It reserves once, for the prompt and the
    longest output of its request, so that no running request can starve another (section 4.2). Pages are allocated as
    tokens are written. A row wastes less than one page. So the pages cover every reservation if
    `num_pages * page_size >= n_slots + num_rows * (page_size - 1)`, and `allocate` within a reservation cannot fail.

    Without `n_slots` nothing is reserved: pages are allocated on demand. The scheduler counts free pages before it
    chooses requests, and preempts the least urgent ones if too few pages are free.

    Args:
        num_pages: pages of the KV cache, numbered `0..num_pages-1`.
        page_size: slots in a page; a slot has the keys and values of one token in all layers.
        num_rows: the largest number of running requests, over all iterations in flight.
        n_slots: the largest number of reserved slots; None for pages on demand.

    Raises:
        ConfigError: a size is below one, or the pages cannot cover `n_slots`.
    """

    def __init__(self, num_pages: int, page_size: int, num_rows: int, n_slots: int | None = None) -> None:
        sizes = {
            "num_pages": num_pages,
            "page_size": page_size,
            "num_rows": num_rows,
            "n_slots": 1 if n_slots is None else n_slots,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
        if n_slots is not None:
            _check_covered(num_pages, page_size, num_rows, n_slots)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_rows = num_rows
        self.n_slots = n_slots
        self.reserved_slots = 0  # [n_rsrv]
        self._free_rows = list(reversed(range(num_rows)))
        self._pages = PagePool(num_pages)
        self._held = [False] * num_rows
        self._slots_of_row = [0] * num_rows
        self._pages_of_row: list[list[int]] = [[] for _ in range(num_rows)]

    @property
    def num_free_pages(self) -> int:
        """Pages without a holder, those in the prefix cache included."""
        return self._pages.num_free

    @property
    def has_reservations(self) -> bool:
        """True if a request reserves all its slots at admission; False for pages on demand."""
        return self.n_slots is not None

    @property
    def capacity(self) -> int:
        """The largest number of tokens of one request."""
        return self.num_pages * self.page_size if self.n_slots is None else self.n_slots

    @property
    def num_held_rows(self) -> int:
        """The number of rows in use."""
        return self.num_rows - len(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        """The number of rows free for new requests."""
        return len(self._free_rows)

    def acquire_row(self) -> int:
        """Take a free row."""
        assert self._free_rows, f"all {self.num_rows} rows are held: the scheduler admitted too many requests"
        row = self._free_rows.pop()
        self._held[row] = True
        return row

    def release_row(self, row: int) -> None:
        """Release a row, after its slots and pages."""
        assert self._held[row], f"row {row} is not held"
        assert not self._slots_of_row[row], f"row {row} still reserves {self._slots_of_row[row]} slots"
        assert not self._pages_of_row[row], f"row {row} still holds pages"
        self._held[row] = False
        self._free_rows.append(row)

    def reserve(self, row: int, slots: int) -> None:
        """Reserve slots for a row (lines 24-26 of Algorithm 1)."""
        assert self._held[row], f"row {row} is not held"
        assert not self._slots_of_row[row], f"row {row} has reserved already"
        assert self.n_slots is not None, "this cache allocates on demand"
        assert self.reserved_slots + slots <= self.n_slots, f"{slots} more slots than n_slots={self.n_slots} allows"
        self._slots_of_row[row] = slots
        self.reserved_slots += slots

    def release(self, row: int) -> None:
        """Release the reservation of a row (line 14 of Algorithm 1)."""
        assert self._slots_of_row[row], f"row {row} reserved nothing"
        self.reserved_slots -= self._slots_of_row[row]
        self._slots_of_row[row] = 0

    def slots_of(self, row: int) -> int:
        """The number of slots reserved by a row."""
        return self._slots_of_row[row]

    def pages_of(self, row: int) -> Sequence[int]:
        """Pages of a row in the order of its tokens; the next `allocate` may extend this view."""
        return self._pages_of_row[row]

    def lacking(self, row: int | None, num_tokens: int) -> int:
        """The number of pages to allocate until a row (None: a new one) can hold `num_tokens` tokens in all."""
        held = 0 if row is None else len(self._pages_of_row[row])
        needed = -(-num_tokens // self.page_size)
        return needed - held if needed > held else 0

    def allocate(self, row: int, num_tokens: int) -> Sequence[int]:
        """Allocate pages until a row can hold `num_tokens` tokens in all; returns the new pages, usually none."""
        pages = self._pages_of_row[row]
        lacking = -(-num_tokens // self.page_size) - len(pages)
        if lacking <= 0:
            return _NO_PAGES
        assert not self.has_reservations or num_tokens <= self._slots_of_row[row], (
            f"row {row} needs slots for {num_tokens} tokens but reserved {self._slots_of_row[row]}"
        )
        new = self._pages.take(lacking)
        pages += new
        return new

    def free(self, row: int) -> None:
        """Free all pages of a row; those in the prefix cache can still be found."""
        self._pages.give_back(self._pages_of_row[row])
        self._pages_of_row[row] = []

    def releasable(self, row: int | None) -> int:
        """The number of pages held by this row alone; `free` makes them available."""
        return 0 if row is None else self._pages.num_held_once(self._pages_of_row[row])

    def find(self, digests: Iterable[bytes]) -> Sequence[int]:
        """Pages with the content of these digests (`Request.digests`). Pass them to `share` before any other change."""
        return self._pages.find(digests)

    def num_kept(self, pages: Sequence[int]) -> int:
        """The number of these pages without a holder; `share` takes them from the free ones."""
        return self._pages.num_kept(pages)

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Begin a row with pages returned by `find`; `free` releases them."""
        assert self._held[row] and not self._pages_of_row[row], f"row {row} is not new"
        self._pages.share(pages)
        self._pages_of_row[row] = list(pages)

    def remember(self, row: int, index: int, digest: bytes, root: bytes) -> bool:
        """Add the full page `index` of a row to the prefix cache; True if no other page has its content.

        `root` is the digest of the row's first page.
        """
        return self._pages.remember(self._pages_of_row[row][index], digest, root)

    def forget(self, root: bytes) -> None:
        """Remove all pages with this root from the prefix cache; rows keep theirs."""
        self._pages.forget(root)

    def forget_all(self) -> None:
        """Empty the prefix cache; rows keep their pages."""
        self._pages.forget_all()

    @property
    def watcher(self) -> CacheWatcher | None:
        """The receiver of changes of the prefix cache, if any."""
        return self._pages.watcher

    def watch(self, watcher: CacheWatcher) -> None:
        """Report each change of the prefix cache from now on. The pool of requests reports the pages added."""
        self._pages.watcher = watcher

    def check_integrity(self) -> None:
        """Assert that no row, slot or page is lost or counted twice. For tests and debugging; O(pages).

        Raises:
            AssertionError: the message names the inconsistency.
        """
        free_rows = sorted(self._free_rows)
        assert free_rows == [row for row in range(self.num_rows) if not self._held[row]], "free and held rows differ"
        for row in free_rows:
            assert not self._pages_of_row[row], f"free row {row} holds pages {self._pages_of_row[row]}"
            assert not self._slots_of_row[row], f"free row {row} reserves {self._slots_of_row[row]} slots"
        for row, pages in enumerate(self._pages_of_row):
            most = -(-self._slots_of_row[row] // self.page_size)
            assert not self.has_reservations or len(pages) <= most, (
                f"row {row} holds {len(pages)} pages, and its reservation covers {most}"
            )
            assert len(set(pages)) == len(pages), f"row {row} holds a page twice: {pages}"
        self._pages.check_integrity(page for pages in self._pages_of_row for page in pages)
        total = sum(self._slots_of_row)
        assert self.reserved_slots == total, f"reserved_slots is {self.reserved_slots}, the rows' sum is {total}"
        assert self.reserved_slots <= self.capacity, f"{self.reserved_slots} of {self.capacity} slots are reserved"


def _check_covered(num_pages: int, page_size: int, num_rows: int, n_slots: int) -> None:
    waste = num_rows * (page_size - 1)
    covered = num_pages * page_size - waste
    if n_slots <= covered:
        return
    remedy = f"raise num_pages to {-(-(n_slots + waste) // page_size)}"
    if covered > 0:
        remedy = f"lower n_slots to at most {covered} or {remedy}"
    raise ConfigError(
        f"{num_pages} pages of {page_size} slots are too few for n_slots={n_slots}: {num_rows} requests may leave "
        f"{waste} slots of their last pages unused; {remedy}",
        param="n_slots" if covered > 0 else "num_pages",
    )
