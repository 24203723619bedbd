"""A retention of a file, for tests."""

from typing import ClassVar

from orca_jax.policy import API, Keeping, KeptSpan


class Mine:
    """The shortest span first."""

    api: ClassVar[int] = API

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """Its tokens."""
        return Keeping(span.num_tokens)


class OfPrograms(Mine):
    """A retention that reads the program of a call."""

    reads: ClassVar[frozenset[str]] = frozenset({"program"})
