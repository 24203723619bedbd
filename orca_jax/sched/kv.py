"""Who holds which rows, reserved slots and pages."""

from collections.abc import Iterable, Sequence

from orca_jax.errors import ConfigError
from orca_jax.sched.pages import PagePool

_NO_PAGES: tuple[int, ...] = ()


class KVManager:
    """The only owner of rows, slots and pages; a row is the name under which slots and pages are held.

    Verbs come in pairs: `acquire_row`/`release_row`, `reserve`/`release` for slots, `allocate`/`free` for pages.

    With `n_slots`, slots are promises, counted in tokens: the paper's `n_rsrv`, made once for all a request may need
    so that no running request can starve another (section 4.2). Pages are what a promise is paid with, as tokens are
    written. Since a row wastes less than one page, `num_pages * page_size >= n_slots + num_rows * (page_size - 1)`
    makes every promise payable, and `allocate` within a reservation cannot fail.

    Without `n_slots` nothing is promised: pages are allocated on demand, the scheduler looks before it chooses, and
    takes pages from the least urgent requests where too few are free.

    Args:
        num_pages: pages of K/V memory, named `0..num_pages-1`.
        page_size: slots in a page; a slot is K and V of one token in all layers.
        num_rows: requests that can run at once, over all iterations in flight.
        n_slots: slots that may be reserved at once; None for pages on demand.

    Raises:
        ConfigError: a size is below one, or the pages cannot pay for `n_slots`.
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
            _check_backed(num_pages, page_size, num_rows, n_slots)
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
        """Pages that no row holds."""
        return self._pages.num_free

    @property
    def has_reservations(self) -> bool:
        """True if a request reserves all slots that it can need; False for pages on demand."""
        return self.n_slots is not None

    @property
    def capacity(self) -> int:
        """Tokens that one request may need at most."""
        return self.num_pages * self.page_size if self.n_slots is None else self.n_slots

    @property
    def num_held_rows(self) -> int:
        """Rows in use."""
        return self.num_rows - len(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        """Rows that a new request can have."""
        return len(self._free_rows)

    def acquire_row(self) -> int:
        """Take a free row."""
        assert self._free_rows, f"all {self.num_rows} rows are held: the scheduler admitted more than fit"
        row = self._free_rows.pop()
        self._held[row] = True
        return row

    def release_row(self, row: int) -> None:
        """Give a row back; its slots and pages went before it."""
        assert self._held[row], f"row {row} is not held"
        assert not self._slots_of_row[row], f"row {row} still reserves {self._slots_of_row[row]} slots"
        assert not self._pages_of_row[row], f"row {row} still holds pages"
        self._held[row] = False
        self._free_rows.append(row)

    def reserve(self, row: int, slots: int) -> None:
        """Promise `slots` slots to a row (lines 24-26 of Algorithm 1)."""
        assert self._held[row], f"row {row} is not held"
        assert not self._slots_of_row[row], f"row {row} has reserved already"
        assert self.n_slots is not None, "this cache allocates on demand"
        assert self.reserved_slots + slots <= self.n_slots, f"{slots} more slots than n_slots={self.n_slots} allows"
        self._slots_of_row[row] = slots
        self.reserved_slots += slots

    def release(self, row: int) -> None:
        """Take a row's promise back (line 14 of Algorithm 1)."""
        assert self._slots_of_row[row], f"row {row} reserved nothing"
        self.reserved_slots -= self._slots_of_row[row]
        self._slots_of_row[row] = 0

    def slots_of(self, row: int) -> int:
        """Slots that a row reserves."""
        return self._slots_of_row[row]

    def pages_of(self, row: int) -> Sequence[int]:
        """Pages of a row in the order of its tokens; a view that the next `allocate` may extend."""
        return self._pages_of_row[row]

    def lacking(self, row: int | None, num_tokens: int) -> int:
        """Pages that a row, or a request without one, lacks to hold `num_tokens` tokens in all."""
        held = 0 if row is None else len(self._pages_of_row[row])
        needed = -(-num_tokens // self.page_size)
        return needed - held if needed > held else 0

    def allocate(self, row: int, num_tokens: int) -> Sequence[int]:
        """Give a row the pages it lacks to hold `num_tokens` tokens in all; returns the new ones, mostly none."""
        lacking = self.lacking(row, num_tokens)
        if not lacking:
            return _NO_PAGES
        assert not self.has_reservations or num_tokens <= self._slots_of_row[row], (
            f"row {row} needs slots for {num_tokens} tokens but reserved {self._slots_of_row[row]}"
        )
        new = self._pages.take(lacking)
        self._pages_of_row[row] += new
        return new

    def free(self, row: int) -> None:
        """Take all pages of a row back; what they contain may still be found."""
        self._pages.give_back(self._pages_of_row[row])
        self._pages_of_row[row] = []

    def releasable(self, row: int | None) -> int:
        """Pages that `free` would make free: those that no other row holds."""
        return 0 if row is None else self._pages.num_held_once(self._pages_of_row[row])

    def find(self, digests: Iterable[bytes]) -> Sequence[int]:
        """Pages that hold this content, by the digests of `sched/prefix.py`; for `share`, before anything else."""
        return self._pages.find(digests)

    def num_kept(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody holds: sharing them makes so many fewer free."""
        return self._pages.num_kept(pages)

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Begin a row with pages that `find` has found; `free` gives them back."""
        assert self._held[row] and not self._pages_of_row[row], f"row {row} is not new"
        self._pages.share(pages)
        self._pages_of_row[row] = list(pages)

    def remember(self, row: int, index: int, digest: bytes) -> None:
        """The row's page `index` is full, so that others may `find` it."""
        self._pages.remember(self._pages_of_row[row][index], digest)

    def check_integrity(self) -> None:
        """Assert that nothing is lost, shared or promised twice. For tests and for anyone in doubt; O(pages).

        Raises:
            AssertionError: with what does not add up.
        """
        free_rows = sorted(self._free_rows)
        assert free_rows == [row for row in range(self.num_rows) if not self._held[row]], "free and held rows differ"
        for row in free_rows:
            assert not self._pages_of_row[row], f"free row {row} holds pages {self._pages_of_row[row]}"
            assert not self._slots_of_row[row], f"free row {row} reserves {self._slots_of_row[row]} slots"
        for row, pages in enumerate(self._pages_of_row):
            most = -(-self._slots_of_row[row] // self.page_size)
            assert not self.has_reservations or len(pages) <= most, (
                f"row {row} holds {len(pages)} pages where its reservation pays for {most}"
            )
            assert len(set(pages)) == len(pages), f"row {row} holds a page twice: {pages}"
        self._pages.check_integrity(page for pages in self._pages_of_row for page in pages)
        total = sum(self._slots_of_row)
        assert self.reserved_slots == total, f"reserved_slots is {self.reserved_slots}, the rows' sum is {total}"
        assert self.reserved_slots <= self.capacity, f"{self.reserved_slots} of {self.capacity} slots are reserved"


def _check_backed(num_pages: int, page_size: int, num_rows: int, n_slots: int) -> None:
    waste = num_rows * (page_size - 1)
    backed = num_pages * page_size - waste
    if n_slots <= backed:
        return
    mend = f"raise num_pages to {-(-(n_slots + waste) // page_size)}"
    if backed > 0:
        mend = f"lower n_slots to at most {backed} or {mend}"
    raise ConfigError(
        f"{num_pages} pages of {page_size} slots cannot back n_slots={n_slots}: {num_rows} requests may leave "
        f"{waste} slots of their last pages unused; {mend}",
        param="n_slots" if backed > 0 else "num_pages",
    )
