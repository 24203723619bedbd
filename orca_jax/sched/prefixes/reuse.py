"""Requests and the prefix cache: the beginning of a new request, and the pages of running and ended ones."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from orca_jax.sched.kv import KVManager
from orca_jax.sched.prefixes.cache import NO_HIT, Hit, Page
from orca_jax.sched.prefixes.outer import OuterPages
from orca_jax.sched.prefixes.spans import NOBODY
from orca_jax.sched.request import Request, id_bytes, page_digest
from orca_jax.sched.states import Snapshot


class PrefixReuse:
    """Finds the beginnings of waiting requests, and adds the pages of others to the prefix cache.

    Full pages enter it when their tokens are computed, the last page of a prompt too, and the last page of a request
    when it leaves its row. A request waits while another one computes the same prompt. With recurrent states snapshots
    enter it too.

    Requests of one call may share the begin of their prompts (`SamplingParams.shared_tokens`): one of them computes it,
    and the others wait for it.

    Args:
        kv: rows and blocks.
        of_calls: True if only requests that share the begin of their prompts are served, and those of other calls have
            another salt: nothing is reused between calls.

    Attributes:
        most_computed: others wait for a prompt while more tokens of it than these are to be computed.
        outer: pages outside of the KV cache; None: there are none.
    """

    def __init__(self, kv: KVManager, *, of_calls: bool = False) -> None:
        self._kv = kv
        self._of_calls = of_calls
        self._size = kv.page_size
        self.most_computed = 1 if kv.states is None else kv.states.worth
        self.outer: OuterPages | None = None
        # by the digest of a prompt: the request that computes it
        self._computing: dict[bytes, Request] = {}

    def find(self, request: Request) -> Hit:
        """The beginning of a waiting request in the prefix cache; at least one token is left to compute."""
        if not self._serves(request):
            return NO_HIT
        size = self._size
        most = request.num_tokens - 1

        def ids(start: int) -> bytes:
            return id_bytes(request.ids_from(start, min(size, most - start)))

        return self._kv.prefixes.find(
            request.digests(size, most // size),
            request.first_digest,
            most,
            ids,
            request.num_shared,
        )

    def awaits_prompt(self, request: Request, chosen: Collection[bytes]) -> bool:
        """True if a waiting request can soon begin with tokens that it computes otherwise.

        Others compute all of its prompt but one token, or pages of it are being read.

        Args:
            request: waits for its row.
            chosen: digests of the prompts of requests chosen before it.
        """
        if self._awaits_pages(request):
            return True
        if not (self._computing or chosen) or not self._serves(request):
            return False
        return any(
            digest in chosen or digest in self._computing for digest in self.awaited(request, 0)
        )

    def _awaits_pages(self, request: Request) -> bool:
        return (
            self.outer is not None
            and self._serves(request)
            and self.outer.awaits(request, request.num_tokens - 1)
        )

    def awaited(self, request: Request, num_computed: int) -> Iterator[bytes]:
        """Digests of the beginnings of a prompt for which others wait, while so many of its tokens are computed.

        That of shared tokens comes first, in one step and without digests of pages: hundreds of requests may wait.
        """
        if request.num_shared > num_computed:
            if not request.shared_digest:
                shared = id_bytes(request.prompt_ids[: request.num_shared])
                request.shared_digest = page_digest(request.first_digest, b"shared" + shared)
            yield request.shared_digest
        num_left = len(request.prompt_ids) - num_computed
        if self._remembers(request) and num_left > self.most_computed:
            yield self.digest_of_prompt(request)

    def digest_of_prompt(self, request: Request) -> bytes:
        """The digest of all of a prompt."""
        if not request.prompt_digest:
            num_full = len(request.prompt_ids) // self._size
            parent = self._digest_before(request, num_full)
            request.prompt_digest = page_digest(
                parent, id_bytes(request.prompt_ids[num_full * self._size :])
            )
        return request.prompt_digest

    def begin(self, request: Request, row: int, hit: Hit) -> None:
        """Begin a row with a hit of its request, and let others with the same prompt wait until it is computed."""
        num_prompt = len(request.prompt_ids)
        request.roots = frozenset()
        if hit.num_tokens:
            request.roots = self._kv.prefixes.roots_of(hit)
            owner = NOBODY if self._kv.retainer is None else request.owner
            self._kv.share(row, hit, owner)
            request.num_remembered = len(hit.blocks[0])
            request.num_computed = hit.num_tokens
        request.remembers_at = min((request.num_remembered + 1) * self._size, num_prompt)
        if self._remembers(request):
            # also of a prompt that is found: a timeline names its last page
            self.digest_of_prompt(request)
        for digest in self.awaited(request, request.num_computed):
            self._computing.setdefault(digest, request)

    def missed(self, request: Request) -> Sequence[bytes]:
        """Digests of the full pages of a prompt after those that its row begins with."""
        found = request.num_computed // self._size
        return request.digests(self._size, len(request.prompt_ids) // self._size)[found:]

    def end(self, request: Request, row: int) -> None:
        """Add the last page of a request that leaves its row."""
        self._is_computed(request)
        if not request.is_suspect and self._remembers(request):
            self.remember(request, row)
            self._remember_last(request, row, min(request.num_computed, request.num_tokens))
            if self.outer is not None:
                self.outer.used(request)
            if self._kv.states is not None and request.num_computed >= self._kv.states.worth:
                self._keep_state(request, row, request.num_computed)

    def snapshot(self, request: Request, row: int, start: int) -> None:
        """Keep the state of a row at a border, for a plan that starts there."""
        assert self._kv.states is not None, "the model has no states"
        if not request.is_suspect and self._kv.states.is_border(
            row, start, len(request.prompt_ids)
        ):
            self._keep_state(request, row, start)

    def remember(self, request: Request, row: int) -> None:
        """Add pages of a running request, as far as their ids are known to the host."""
        if request.num_computed < request.remembers_at:
            return  # nearly always
        if not self._remembers(request):
            return
        size = self._size
        num_prompt = len(request.prompt_ids)
        watcher = self._kv.prefixes.watcher
        num_full = min(request.num_computed, request.num_tokens) // size
        digests = request.digests(size, num_full)
        num_new = 0
        for index in range(request.num_remembered, num_full):
            parent = digests[index - 1] if index else request.first_digest
            ids = request.ids_from(index * size, size)
            request.roots = request.roots or frozenset((digests[0],))
            new = self._kv.remember(
                row, index, Page(digests[index], parent, id_bytes(ids), request.roots)
            )
            num_new += bool(new)
            if self.outer is not None and new:
                self.outer.remembered(digests[index], index, new, row)
            if watcher is not None:
                before = parent if index else None
                salt = request.params.cache_salt
                for group in new:
                    watcher.stored(digests[index], before, ids, salt, request.adapter, group)
        if num_new:
            # the pages that were there before are the first ones
            request.count_written((num_full - num_new) * size, num_new * size)
        request.num_remembered = max(request.num_remembered, num_full)
        request.remembers_at = (request.num_remembered + 1) * size
        if request.num_computed < num_prompt:
            request.remembers_at = min(request.remembers_at, num_prompt)
        elif self._is_computed(request):
            self._remember_last(request, row, num_prompt)

    def distrust(self, request: Request, running: Iterable[Request]) -> None:
        """Remove pages with possible NaN from the prefix cache, after logits with values that are not finite.

        The wrong values may be in any page that the request wrote, shared or copied, and in all pages computed from
        these, of live requests and of earlier ones. They have a root in common.
        """
        if not request.roots:  # it has neither found nor remembered a page
            return
        self._kv.prefixes.forget(request.roots)
        for other in running:
            if other.roots & request.roots:
                other.is_suspect = True

    def _remembers(self, request: Request) -> bool:
        """True if the pages of a request enter the prefix cache."""
        return request.num_shared > 0 or not self._of_calls

    def _serves(self, request: Request) -> bool:
        """True if a request may begin with blocks of another one."""
        return request.may_read_prefixes and self._remembers(request)

    def _digest_before(self, request: Request, index: int) -> bytes:
        """The digest of all tokens before a page."""
        if index:
            return request.digests(self._size, index)[-1]
        return request.first_digest

    def _remember_last(self, request: Request, row: int, num_tokens: int) -> None:
        """Add the page after the full ones, as far as it has tokens below `num_tokens`."""
        index = request.num_remembered
        ids = id_bytes(
            request.ids_from(index * self._size, max(0, num_tokens - index * self._size))
        )
        if ids:
            parent = self._digest_before(request, index)
            digest = page_digest(parent, ids)
            request.roots = request.roots or frozenset((digest,))
            page = Page(digest, parent, ids, request.roots, is_full=False)
            if self._kv.remember(row, index, page):
                request.count_written(index * self._size, self._size)

    def _keep_state(self, request: Request, row: int, num_tokens: int) -> None:
        """Make the state of a row after so many tokens a snapshot, if the host knows their ids."""
        if num_tokens > request.num_tokens:
            return
        assert self._kv.states is not None, "the model has no states"
        index, num_begun = divmod(num_tokens, self._size)
        parent = self._digest_before(request, index)
        ids = id_bytes(request.ids_from(index * self._size, num_begun))
        digest = page_digest(parent, ids) if ids else parent
        request.roots = request.roots or frozenset((digest,))
        self._kv.states.name(row, Snapshot(digest, parent, ids, request.roots))
        if self.outer is not None and index and not ids:
            self.outer.kept_state(digest, index - 1)

    def _is_computed(self, request: Request) -> bool:
        """End the wait for the prompt of a request; False if no request waits for it."""
        found = False
        for digest in (request.shared_digest, request.prompt_digest):
            if self._computing.get(digest) is request:
                del self._computing[digest]
                found = True
        return found
