"""A model whose next token can be computed by hand, behind the real contract.

The next id after ids `x_0 .. x_{n-1}` is `sum((i + 1) * (x_i + 1)) mod vocab_size` where sampling is greedy, and
with a temperature `seed + n + top_k` is added to the sum. So every id, its position, the row's seed and every page
matter. `ToyExecutor` trusts no plan: what a scheduler gets wrong ends in an AssertionError.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from orca_jax.config import ModelConfig
from orca_jax.request import SamplingParams
from orca_jax.step import ExecutorStats, Handle, Member, RowSampling, StepPlan, StepResult

Override = Callable[[str, int, int], int | None]
"""(request id, context length, the model's choice) -> the id to return, or None for logits that are not finite."""


TOY_MODEL = ModelConfig(
    family="toy",
    vocab_size=257,  # bytes and an end token
    num_layers=1,
    embed_dim=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    mlp_dim=1,
    max_positions=16384,
    norm="layernorm",
    norm_eps=1e-5,
    activation="gelu",
    gated_mlp=False,
    attention_bias=False,
    mlp_bias=False,
    tied_embeddings=True,
    eos_token_ids=(256,),
)


def toy_generate(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    seed: int = 0,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """What the toy model generates for one request alone, with neither pages nor batches: the oracle of tests.

    `seed` is the resolved one, for a request without a seed of its own. A final stop token is included.
    """
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    ids = list(prompt_ids)
    total = sum((i + 1) * (token + 1) for i, token in enumerate(ids))
    for _ in range(params.max_tokens):
        noise = 0
        if params.temperature > 0:
            noise = (seed if params.seed is None else params.seed) + len(ids) + max(params.top_k, 0)
        token = (total + noise) % vocab_size
        ids.append(token)
        total += len(ids) * (token + 1)
        if token in stop_ids:
            break
    return ids[len(prompt_ids) :]


@dataclass(slots=True)
class _Row:
    """What the device knows about one row."""

    request_id: str
    sampling: RowSampling
    pages: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # the model's sum after each position
    last_token: int | None = None


@dataclass(slots=True)
class _ToyHandle:
    """An iteration in flight: its result, and the time when it may be seen."""

    result: StepResult
    ready_at: float


class ToyExecutor:
    """`step.Executor` over simulated pages; standard library only.

    Args:
        vocab_size: ids are below it.
        num_pages: pages of simulated K/V memory.
        page_size: slots in a page.
        num_rows: rows that plans may name.
        latency: seconds that one iteration takes; iterations in flight run one after another.
        override: may replace every sampled id, or declare its logits not finite.
        check_pages: read each context back through its page table before sampling, which costs time in proportion to
            its length; without it, a running sum is trusted.
    """

    def __init__(
        self,
        vocab_size: int,
        num_pages: int,
        page_size: int,
        num_rows: int,
        *,
        latency: float = 0.0,
        override: Override | None = None,
        check_pages: bool = True,
    ) -> None:
        self.stats = ExecutorStats()
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._num_rows = num_rows
        self._latency = latency
        self._override = override
        self._check_pages = check_pages
        self._pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._owner_of_page: list[int | None] = [None] * num_pages
        self._rows: dict[int, _Row] = {}
        self._in_flight: deque[_ToyHandle] = deque()
        self._ready_at = 0.0
        self._closed = False

    def submit(self, plan: StepPlan) -> Handle:
        """Run a plan at once, and let its result be seen `latency` seconds after the one before it."""
        assert not self._closed, "submit after close"
        assert plan.members, f"iteration {plan.iteration} is empty"
        assert plan.iteration == self.stats.iterations, (
            f"iteration {plan.iteration} where {self.stats.iterations} is due"
        )
        rows = [member.row for member in plan.members]
        assert len(set(rows)) == len(rows), f"iteration {plan.iteration} names a row twice: {rows}"
        # First all writes, then all reads, as on a device: a page in two rows shows in both.
        for member in plan.members:
            self._write(member)
        samples = [self._sample(member) for member in plan.members if member.samples]
        result = StepResult(plan.iteration, [token or 0 for token in samples], [token is not None for token in samples])
        self.stats.iterations += 1
        self.stats.launches += 1
        self.stats.tokens += plan.num_tokens
        self._ready_at = max(time.perf_counter(), self._ready_at) + self._latency
        handle = _ToyHandle(result, self._ready_at)
        self._in_flight.append(handle)
        return handle

    def collect(self, handle: Handle) -> StepResult:
        """Wait until the oldest iteration in flight is done."""
        assert self._in_flight, "nothing is in flight"
        oldest = self._in_flight.popleft()
        assert oldest is handle, "collected out of order"
        if self._latency:
            wait = max(0.0, oldest.ready_at - time.perf_counter())
            time.sleep(wait)
            self.stats.wait_seconds += wait
        return oldest.result

    def close(self) -> None:
        """Refuse further plans."""
        self._closed = True

    def _write(self, member: Member) -> None:
        """Put a member's ids into its pages, and check all that its plan claims."""
        assert 0 <= member.row < self._num_rows, f"row {member.row} of {self._num_rows}"
        row = self._holder(member)
        ids = list(member.ids)
        if member.last_on_device:
            assert row.last_token is not None, f"row {member.row} has no token on the device"
            ids.append(row.last_token)
        assert ids, f"{member.request_id} processes nothing"
        assert all(0 <= token < self._vocab_size for token in ids), f"{member.request_id}: ids outside the vocabulary"
        assert member.start <= len(row.sums), (
            f"{member.request_id} starts at {member.start} after {len(row.sums)} tokens"
        )
        end = member.start + len(ids)
        assert end <= len(row.pages) * self._page_size, f"{member.request_id}: {end} tokens in {len(row.pages)} pages"
        total = row.sums[member.start - 1] if member.start else 0
        del row.sums[member.start :]
        for position, token in enumerate(ids, start=member.start):
            page, slot = divmod(position, self._page_size)
            self._pages[row.pages[page]][slot] = token
            total += (position + 1) * (token + 1)
            row.sums.append(total)

    def _holder(self, member: Member) -> _Row:
        """The state of a member's row, which starts afresh for a new holder, with the new pages appended."""
        if member.sampling is not None:
            self._rows[member.row] = _Row(member.request_id, member.sampling)
            assert member.num_old_pages == 0, f"{member.request_id} is new in row {member.row} and has old pages"
        row = self._rows[member.row]
        assert row.request_id == member.request_id, f"row {member.row} is {row.request_id}'s, not {member.request_id}'s"
        assert member.num_old_pages == len(row.pages), (
            f"{member.request_id} has {len(row.pages)} pages, the plan says {member.num_old_pages}"
        )
        for page in member.new_pages:
            self._owner_of_page[page] = member.row
            self._pages[page] = [None] * self._page_size
        row.pages += member.new_pages
        return row

    def _sample(self, member: Member) -> int | None:
        """The next id after a member's whole context; None where the logits are not finite."""
        row = self._rows[member.row]
        length = len(row.sums)
        total = row.sums[-1]
        if self._check_pages:
            read_back = self._sum_of_pages(row, member)
            assert read_back == total, f"{member.request_id}: another request wrote into its pages"
        sampling = row.sampling
        noise = sampling.seed + length + sampling.top_k if sampling.temperature > 0 else 0
        token: int | None = (total + noise) % self._vocab_size
        if self._override is not None and token is not None:
            token = self._override(member.request_id, length, token)
        row.last_token = token
        return token

    def _sum_of_pages(self, row: _Row, member: Member) -> int:
        total = 0
        for position in range(len(row.sums)):
            page, slot = divmod(position, self._page_size)
            index = row.pages[page]
            assert self._owner_of_page[index] == member.row, (
                f"page {index} of {member.request_id} was given to row {self._owner_of_page[index]} too"
            )
            token = self._pages[index][slot]
            assert token is not None, f"{member.request_id} reads position {position}, which nobody wrote"
            total += (position + 1) * (token + 1)
        return total
