"""A retention of one's own: conversations that go on are kept, and others give up their pages first.

    python examples/own_retention.py
    orca-jax check-policy examples/own_retention.py:GoesOn
    orca-jax serve demo --retention examples/own_retention.py:GoesOn

The engine asks it about each span of pages that a request leaves in the prefix cache. See docs/own_scheduler.md.
"""

from typing import ClassVar

from orca_jax.policy import API, Keeping, KeptSpan
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate


class GoesOn:
    """Pages that were used before are kept for a minute; the others go first, the least recently used one of each."""

    api: ClassVar[int] = API

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """Rank pages that were used in the last minute before others."""
        left = span.kept_at + 60.0 - now
        if span.hits and left > 0:
            return Keeping(1.0, left)
        return Keeping(0.0)


def main() -> None:
    """Serve a conversation of ten turns among prompts that come once, with either retention."""
    load = []
    talk = list(range(100, 400))
    for turn in range(10):
        load.append(SimulatedRequest(4.0 * turn, talk, 8))
        talk = [*talk, *range(400 + 20 * turn, 420 + 20 * turn)]
        once = range(1000 + 8 * turn, 1008 + 8 * turn) if turn else ()
        load += [SimulatedRequest(4.0 * turn + 1, [number] * 320, 8) for number in once]
    cost = LinearCost(0.02, 1e-4, 0.0)
    for name in ("lru", f"{__file__}:GoesOn"):
        run = simulate("chunked", load, cost, max_num_seqs=4, num_pages=120, retention=name)
        cached = sum([record.cached for record in run.records])
        print(f"{name.rpartition(':')[2]}: {cached} tokens were in the cache")


if __name__ == "__main__":
    main()
