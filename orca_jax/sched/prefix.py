"""Digests of what pages contain: a chain, so that equal digests mean equal tokens from the first one on."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from orca_jax.sched.request import Request
from orca_jax.step import has_penalty


def digests_of(request: Request, page_size: int, num_pages: int) -> Sequence[bytes]:
    """Digests of a request's first `num_pages` full pages; computed once, and kept with the request.

    The chain starts from the request's salt, so that requests with different salts never find each other's pages, not
    even by how quickly an answer comes. SHA-256, since ids may be chosen by somebody who wants a collision.
    """
    digests = request.page_digests
    while len(digests) < num_pages:
        parent = digests[-1] if digests else sha256(request.params.cache_salt.encode()).digest()
        ids = request.ids_from(len(digests) * page_size, page_size)
        assert len(ids) == page_size, f"{request.request_id}: page {len(digests)} is not full"
        digests.append(sha256(parent + _bytes(ids)).digest())
    return digests[:num_pages]


def may_read(request: Request) -> bool:
    """Whether a request may begin with pages that another one wrote.

    Prompt log probabilities need every position computed, and penalties count ids on the device, in a history that
    only computing fills.
    """
    return request.params.prompt_logprobs is None and not has_penalty(request.params)


def _bytes(ids: Sequence[int]) -> bytes:
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
