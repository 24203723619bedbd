"""The memory of the toy model's device, and its checks of every plan."""

from dataclasses import dataclass, field
from itertools import accumulate

from orca_jax.step import Member, RowSampling


@dataclass(slots=True)
class ToyRow:
    """The state of one row on the device."""

    request_id: str
    sampling: RowSampling
    pages: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # the model's sum after each position
    last_token: int | None = None


class ToyMemory:
    """Rows, and simulated pages of ids. A wrong plan raises an AssertionError.

    Args:
        vocab_size: ids are below it.
        num_pages: pages of the simulated KV cache.
        page_size: slots in a page.
        num_rows: rows of plans are below it.
    """

    def __init__(self, vocab_size: int, num_pages: int, page_size: int, num_rows: int) -> None:
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._num_rows = num_rows
        self._pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._readers: list[set[int]] = [set() for _ in range(num_pages)]  # rows with each page
        self._rows: dict[int, ToyRow] = {}
        self.slots: dict[int, int] = {0: 0}  # the number of the adapter in each slot

    def row(self, index: int) -> ToyRow:
        """The state of a row with a holder."""
        return self._rows[index]

    def write(self, member: Member) -> None:
        """Write a member's ids into its pages, and check every claim of its plan."""
        assert 0 <= member.row < self._num_rows, f"row {member.row} of {self._num_rows}"
        row = self._holder(member)
        ids = list(member.ids)
        if member.last_on_device:
            assert row.last_token is not None, f"row {member.row} has no token on the device"
            ids.append(row.last_token)
        assert ids, f"{member.request_id} processes nothing"
        if member.targets or member.is_constrained or member.num_drafts:
            self._check_claims(member, ids)
        assert all(0 <= token < self._vocab_size for token in ids), f"{member.request_id}: ids outside the vocabulary"
        assert member.start <= len(row.sums), (
            f"{member.request_id} starts at {member.start} after {len(row.sums)} tokens"
        )
        del row.sums[member.start :]
        self._append(member.row, member.start, ids)

    def _append(self, index: int, start: int, ids: list[int]) -> None:
        row = self._rows[index]
        end = start + len(ids)
        assert end <= len(row.pages) * self._page_size, f"{row.request_id}: {end} tokens in {len(row.pages)} pages"
        total = row.sums[start - 1] if start else 0
        adapter = self._adapter_of(row)
        for position, token in enumerate(ids, start=start):
            number, slot = divmod(position, self._page_size)
            page = row.pages[number]
            assert self._readers[page] == {index}, f"{row.request_id} writes into page {page}, which is shared"
            self._pages[page][slot] = token + self._vocab_size * adapter
            total += (position + 1) * (token + 1 + adapter)
            row.sums.append(total)

    def ids_of(self, index: int) -> list[int]:
        """A row's whole context, read back through its page table."""
        return self._read(index, len(self._rows[index].sums))

    def _read(self, index: int, count: int) -> list[int]:
        row, ids = self._rows[index], []
        adapter = self._adapter_of(row)
        for position in range(count):
            number, slot = divmod(position, self._page_size)
            page = row.pages[number]
            readers, token = self._readers[page], self._pages[page][slot]
            assert index in readers, f"page {page} of {row.request_id} was given to row {min(readers)} too"
            assert token is not None, f"{row.request_id} reads position {position}, which was never written"
            assert token // self._vocab_size == adapter, f"{row.request_id} reads a page of another adapter"
            ids.append(token % self._vocab_size)
        return ids

    def _adapter_of(self, row: ToyRow) -> int:
        slot = row.sampling.slot
        assert slot in self.slots, f"{row.request_id} has slot {slot}, which was never written"
        return self.slots[slot]

    def check(self, index: int) -> None:
        """Check a row's pages: they must hold the ids written for it, and no others."""
        row = self._rows[index]
        adapter = self._adapter_of(row)
        total = sum((position + 1) * (token + 1 + adapter) for position, token in enumerate(self.ids_of(index)))
        assert total == row.sums[-1], f"{row.request_id}: another request wrote into its pages"

    def _holder(self, member: Member) -> ToyRow:
        """The state of a member's row with the new pages appended; a new holder starts with an empty row."""
        if member.sampling is not None:
            self._rows[member.row] = ToyRow(member.request_id, member.sampling)
            assert member.num_old_blocks == 0, f"{member.request_id} is new in row {member.row} and has old blocks"
        row = self._rows[member.row]
        assert row.request_id == member.request_id, f"row {member.row} is {row.request_id}'s, not {member.request_id}'s"
        assert member.num_old_blocks == len(row.pages), (
            f"{member.request_id} has {len(row.pages)} blocks, but the plan has {member.num_old_blocks}"
        )
        (new,) = member.new_blocks or ((),)
        for number, page in enumerate(new, start=len(row.pages)):
            if (number + 1) * self._page_size <= member.start:  # another request filled it with the same ids
                self._readers[page].add(member.row)
            else:
                self._readers[page] = {member.row}
                self._pages[page] = [None] * self._page_size
        row.pages += new
        if member.sampling is not None and member.start:
            ids = self._read(member.row, member.start)
            adapter = self._adapter_of(row)
            row.sums = list(accumulate((i + 1) * (token + 1 + adapter) for i, token in enumerate(ids)))
        return row

    def _check_claims(self, member: Member, ids: list[int]) -> None:
        assert member.is_sampling or not member.is_constrained, (
            f"{member.request_id} is constrained and does not sample"
        )
        if member.num_drafts:
            assert member.is_sampling and member.num_drafts < len(member.ids), f"{member.request_id}: only proposals"
            is_plain = not (member.is_constrained or member.targets or member.last_on_device)
            assert is_plain, f"{member.request_id}: proposals beside targets, a constraint or an id on the device"
            params = self._rows[member.row].sampling.params
            assert not params.has_extras, f"{member.request_id}: proposals of a request with extras"
        if not member.targets:
            return
        targets, expected = list(member.targets), len(ids) - member.is_sampling
        assert len(targets) == expected, f"{member.request_id}: {len(targets)} targets for {len(ids)} tokens"
        assert all(0 <= token < self._vocab_size for token in targets), (
            f"{member.request_id}: targets outside the vocabulary"
        )
        assert targets[: len(ids) - 1] == ids[1:], f"{member.request_id}: targets are not the following ids"
