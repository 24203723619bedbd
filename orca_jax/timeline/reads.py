"""Reads of decisions in a timeline: which requests belong to one call."""

from orca_jax.sched.request import Request


class ReadCalls:
    """Finds the reads of each call, by their arrivals.

    The reads of a call arrive in a row, share the tokens of its state, and have the same salt. If the first one comes
    again, another call has begun.
    """

    def __init__(self) -> None:
        self._first: Request | None = None  # read of the last call

    def first_of(self, request: Request) -> int | None:
        """The number of the first read of a request's call; None for other requests."""
        if not request.params.shared_tokens:
            self._first = None
            return None
        if self._first is None or not _are_of_one_call(self._first, request):
            self._first = request
        return self._first.arrival_index


def _are_of_one_call(first: Request, read: Request) -> bool:
    ours = first.params
    theirs = read.params
    if (ours.shared_tokens, ours.cache_salt) != (theirs.shared_tokens, theirs.cache_salt):
        return False
    if first.adapter != read.adapter or first.prompt_ids == read.prompt_ids:
        return False
    shared = ours.shared_tokens
    return bool(first.prompt_ids[:shared] == read.prompt_ids[:shared])
