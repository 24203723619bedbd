"""The memory of the toy model's device, and its checks of every plan.

In a vector span the number of a vector takes the place of the id `x_i` in the model's sum (`toy.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from orca_jax.values.cache_spec import NO_BLOCK, LayerGroup
from orca_jax.values.step import BlockCopy, Member, RowSampling, VectorSpan, spans_of

_Contents = list[int | None]
"""The tokens of a block: the id and the adapter of each as one number, then the model's sum up to each position."""


_OwnBlocks = tuple[list[int], list[set[int]], list[_Contents], int]
"""The blocks of a row in a group, the readers and the contents of all blocks of its pool, and the row as a reader."""


def toy_span(place: int, length: int, name: str, first: int) -> VectorSpan:
    """A span of the toy's front end: its vectors are the numbers from `first` on, which is in the key and the digest.

    `name` is that of one upload, so several keys may have the same vectors.
    """
    return VectorSpan(place, length, sha256(b"%d" % first).digest(), f"{name}:{first}")


def _values(ids: Sequence[int], spans: Sequence[VectorSpan]) -> Sequence[int]:
    """The number `x_i` of each token: its id, or that of its vector."""
    if not spans:
        return ids
    values = list(ids)
    for place, length, digest, key in spans:
        first = int(key.rpartition(":")[2])
        assert digest == sha256(b"%d" % first).digest(), f"the digest of {key} is that of others"
        for at in range(max(0, place), min(place + length, len(values))):
            values[at] = first + at - place
    return values


@dataclass(slots=True)
class ToyRow:
    """The state of one row on the device."""

    request_id: str
    sampling: RowSampling
    blocks: Sequence[list[int]]  # by group; `NO_BLOCK` where the row never had one, or has left it
    own_blocks: Sequence[_OwnBlocks]  # by group
    num_left: list[int]  # by group; blocks before these were left
    # the context; without meaning where a prefix hit left it out
    ids: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # the model's sum after each position
    start: int = 0  # of the last member
    last_token: int | None = None


class ToyMemory:
    """Rows, and simulated blocks of ids in each group of layers. A wrong plan raises an AssertionError.

    Each group has all tokens, as each layer of a model has. A row loses the blocks that no later token reads. Reading
    one of these, or one that another row has got, raises. A state is the number of a row's tokens and their sum.
    Reading one of other tokens raises: the block was never written, or another row wrote into it.

    Args:
        vocab_size: ids are below it.
        num_blocks: blocks of each pool of the simulated KV cache.
        page_size: slots in a block.
        num_rows: rows of plans are below it.
        groups: the groups of layers.
        num_states: blocks of states; 0: the model has none.
    """

    def __init__(
        self,
        vocab_size: int,
        num_blocks: Sequence[int],
        page_size: int,
        num_rows: int,
        groups: Sequence[LayerGroup],
        num_states: int = 0,
    ) -> None:
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._num_rows = num_rows
        self._groups = groups
        self._pools = [(index, group.pool) for index, group in enumerate(groups)]
        self._windows = [
            (index, group) for index, group in enumerate(groups) if group.window is not None
        ]
        self._blocks: list[list[_Contents]] = [
            [self._empty() for _ in range(number)] for number in num_blocks
        ]
        self._readers: list[list[set[int]]] = [
            [set() for _ in range(number)] for number in num_blocks
        ]
        self._states: list[tuple[int, int] | None] = [None] * num_states
        self._rows: dict[int, ToyRow] = {}
        # pools and targets of the copies of the current plan
        self._copied: set[tuple[int, int]] = set()
        self.slots: dict[int, int] = {0: 0}  # the number of the adapter in each slot

    def row(self, index: int) -> ToyRow:
        """The state of a row with a holder."""
        return self._rows[index]

    def _empty(self) -> _Contents:
        return [None] * (2 * self._page_size)

    def _reader(self, index: int, group: int) -> int:
        """The number of a row in a group, as readers of blocks have it."""
        return index * len(self._groups) + group

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks: first all are read, then all are written."""
        contents = []
        for group, source, target in copies:
            pool = self._groups[group].pool
            contents.append((pool, target, list(self._blocks[pool][source])))
        self._copied = {(pool, target) for pool, target, _ in contents}
        assert len(self._copied) == len(copies), "a block is the target of two copies"
        sources = {(self._groups[group].pool, source) for group, source, _ in copies}
        assert not sources & self._copied, (
            f"blocks {sources & self._copied} are sources and targets"
        )
        for pool, target, content in contents:
            self._blocks[pool][target] = content

    def check_moves(self, members: Sequence[Member]) -> None:
        """Check that each state block of a plan has one writer, and no other reader."""
        moves = [member.state for member in members if member.state is not None]
        assert len(moves) == (len(members) if self._states else 0), (
            "a member lacks its state, or has one too many"
        )
        assert len({move.target for move in moves}) == len(moves), (
            "a state block is the target of two members"
        )
        for move in moves:
            others = [other for other in moves if other is not move]
            assert move.target not in [other.source for other in others], (
                f"state {move.target} is read and written"
            )

    def write(self, member: Member) -> None:
        """Write a member's ids into its blocks, and check every claim of its plan."""
        assert 0 <= member.row < self._num_rows, f"row {member.row} of {self._num_rows}"
        row = self._holder(member)
        ids = list(member.ids)
        if member.last_on_device:
            assert row.last_token is not None, f"row {member.row} has no token on the device"
            ids.append(row.last_token)
        assert ids, f"{member.request_id} processes nothing"
        if member.targets or member.is_constrained or member.num_drafts:
            self._check_claims(member, ids)
        start = member.start
        num_tokens = len(row.sums)
        assert start <= num_tokens, (
            f"{member.request_id} starts at {start} after {num_tokens} tokens"
        )
        # by an ended request in its place: it has no use for a state
        is_repeated = start < num_tokens
        if is_repeated:
            del row.sums[start:], row.ids[start:]
        elif member.state is not None:
            self._check_state(member, row)
        row.start = start
        self._append(row, ids, _values(ids, spans_of(member.ids)))
        if member.state is not None:
            self._states[member.state.target] = (
                None if is_repeated else (len(row.sums), row.sums[-1])
            )

    def _check_state(self, member: Member, row: ToyRow) -> None:
        """Read the state that a member continues from."""
        assert member.state is not None, "no state"
        source = member.state.source
        if source == NO_BLOCK:
            assert not member.start, f"{member.request_id} starts at {member.start} from zeros"
            return
        assert member.start, f"{member.request_id} does not start from zeros"
        found = self._states[source]
        assert found is not None, (
            f"{member.request_id} reads state {source}, which was never written"
        )
        assert found == (member.start, row.sums[member.start - 1]), (
            f"{member.request_id} starts at {member.start} and reads state {source}, which is that of other tokens"
        )

    def _append(self, row: ToyRow, ids: list[int], values: Sequence[int]) -> None:
        size = self._page_size
        vocab_size = self._vocab_size
        sums = row.sums
        total = sums[-1] if sums else 0
        adapter = self._adapter_of(row)
        row.ids += ids
        for position, (token, value) in enumerate(zip(ids, values, strict=True), row.start):
            assert 0 <= token < vocab_size, f"{row.request_id}: ids outside the vocabulary"
            total += (position + 1) * (value + 1 + adapter)
            sums.append(total)
            number, slot = divmod(position, size)
            for blocks, readers, contents, reader in row.own_blocks:
                assert number < len(blocks), (
                    f"{row.request_id}: position {position} in {len(blocks)} pages"
                )
                block = blocks[number]
                assert block != NO_BLOCK, (
                    f"{row.request_id} writes position {position} into a block that it has left"
                )
                assert readers[block] == {reader}, (
                    f"{row.request_id} writes into page {block}, which is shared"
                )
                held = contents[block]
                held[slot] = token + vocab_size * adapter
                held[size + slot] = total

    def check(self, index: int) -> None:
        """Check a row's blocks: they must hold the tokens written for it, as far as its last member reads them."""
        row = self._rows[index]
        for group, layers in enumerate(self._groups):
            for position in range(layers.first_needed(row.start), len(row.sums)):
                _, total = self._read(index, group, position)
                assert total == row.sums[position], (
                    f"{row.request_id}: another request wrote into its pages"
                )

    def _read(self, index: int, group: int, position: int) -> tuple[int, int]:
        """The id of a token of a row and the sum there, read back through the row's table of blocks."""
        row = self._rows[index]
        pool = self._groups[group].pool
        number, slot = divmod(position, self._page_size)
        block = row.blocks[group][number]
        assert block != NO_BLOCK, (
            f"{row.request_id} reads position {position} in a block that it has left"
        )
        readers = self._readers[pool][block]
        held = self._blocks[pool][block]
        assert self._reader(index, group) in readers, (
            f"page {block} of {row.request_id} was given to row {min(readers) // len(self._groups)} too"
        )
        code = held[slot]
        total = held[self._page_size + slot]
        assert code is not None and total is not None, (
            f"{row.request_id} reads position {position}, which was never written"
        )
        adapter, token = divmod(code, self._vocab_size)
        assert adapter == self._adapter_of(row), f"{row.request_id} reads a page of another adapter"
        return token, total

    def _adapter_of(self, row: ToyRow) -> int:
        slot = row.sampling.slot
        assert slot in self.slots, f"{row.request_id} has slot {slot}, which was never written"
        return self.slots[slot]

    def _holder(self, member: Member) -> ToyRow:
        """The state of a member's row with the new blocks appended; a new holder starts with an empty row."""
        if member.sampling is not None:
            lists = [list[int]() for _ in self._groups]
            own_blocks = [
                (blocks, self._readers[pool], self._blocks[pool], self._reader(member.row, group))
                for blocks, (group, pool) in zip(lists, self._pools, strict=True)
            ]
            self._rows[member.row] = ToyRow(
                member.request_id, member.sampling, lists, own_blocks, [0] * len(lists)
            )
            assert member.num_old_blocks == 0, (
                f"{member.request_id} is new in row {member.row} and has old blocks"
            )
        row = self._rows[member.row]
        assert row.request_id == member.request_id, (
            f"row {member.row} is {row.request_id}'s, not {member.request_id}'s"
        )
        num_pages = len(row.blocks[0])
        assert member.num_old_blocks == num_pages, (
            f"{member.request_id} has {num_pages} blocks, but the plan has {member.num_old_blocks}"
        )
        for group, layers in self._windows:
            first = layers.first_needed(member.start) // self._page_size
            assert first >= row.num_left[group], (
                f"{member.request_id} lacks blocks of group {group}"
            )
            if first > row.num_left[group]:
                self._leave(member.row, group, first)
        if member.new_blocks:
            self._extend(member, row)
        if member.sampling is not None and member.start:
            self._resume(member)
        return row

    def _extend(self, member: Member, row: ToyRow) -> None:
        """Append the new blocks of a plan to a row, as many in each group."""
        num_pages = len(row.blocks[0])
        num_new = len(member.new_blocks[0])
        for group, blocks in enumerate(member.new_blocks):
            assert len(blocks) == num_new, (
                f"{member.request_id}: groups have different numbers of blocks"
            )
            for number, block in enumerate(blocks, start=num_pages):
                if block != NO_BLOCK:
                    self._take(member, group, number, block)
            row.blocks[group].extend(blocks)
            assert NO_BLOCK not in blocks[max(0, row.num_left[group] - num_pages) :], (
                f"{member.request_id} lacks blocks of group {group}"
            )

    def _take(self, member: Member, group: int, number: int, block: int) -> None:
        """Let a row read a block that another request filled with the same ids, or clear one of its own."""
        pool = self._groups[group].pool
        if (number + 1) * self._page_size <= member.start:
            self._readers[pool][block].add(self._reader(member.row, group))
            return
        self._readers[pool][block] = {self._reader(member.row, group)}
        if (pool, block) not in self._copied:
            self._blocks[pool][block] = self._empty()

    def _leave(self, index: int, group: int, first: int) -> None:
        """Take the blocks before the `first` from a row: the host may have given them to another one."""
        row = self._rows[index]
        pool = self._groups[group].pool
        blocks = row.blocks[group]
        for number in range(row.num_left[group], min(first, len(blocks))):
            if blocks[number] != NO_BLOCK:
                self._readers[pool][blocks[number]].discard(self._reader(index, group))
                blocks[number] = NO_BLOCK
        row.num_left[group] = first

    def _resume(self, member: Member) -> None:
        """Read the context of a new holder that begins with blocks of the prefix cache."""
        row = self._rows[member.row]
        first = [layers.first_needed(member.start) for layers in self._groups]
        group = first.index(min(first))  # it has the most
        found = [
            self._read(member.row, group, position)
            for position in range(first[group], member.start)
        ]
        row.ids = [0] * first[group] + [token for token, _ in found]
        row.sums = [0] * first[group] + [total for _, total in found]

    def _check_claims(self, member: Member, ids: list[int]) -> None:
        assert member.is_sampling or not member.is_constrained, (
            f"{member.request_id} is constrained and does not sample"
        )
        if member.num_drafts:
            assert member.is_sampling and member.num_drafts < len(member.ids), (
                f"{member.request_id}: only proposals"
            )
            is_plain = not (member.is_constrained or member.targets or member.last_on_device)
            assert is_plain, (
                f"{member.request_id}: proposals beside targets, a constraint or an id on the device"
            )
            params = self._rows[member.row].sampling.params
            assert not params.has_extras, f"{member.request_id}: proposals of a request with extras"
        if not member.targets:
            return
        targets = list(member.targets)
        expected = len(ids) - member.is_sampling
        assert len(targets) == expected, (
            f"{member.request_id}: {len(targets)} targets for {len(ids)} tokens"
        )
        assert all(0 <= token < self._vocab_size for token in targets), (
            f"{member.request_id}: targets outside the vocabulary"
        )
        assert targets[: len(ids) - 1] == ids[1:], (
            f"{member.request_id}: targets are not the following ids"
        )
