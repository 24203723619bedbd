"""How long will a request really run? Nobody knows; these guess, when it arrives.

Orderings and check-in intervals read the guess from `Request.predicted_output`. It decides who goes first and how often
one looks, never what is generated: a wrong guess costs time and nothing else.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Protocol

from orca_jax.sched.request import Request

WINDOW = 256  # lengths that are remembered of each class
ENOUGH = 16  # of them, before anybody believes them


class Predictor(Protocol):
    """Guesses from what is known at arrival, and may learn from requests that have ended."""

    name: str

    def predict(self, request: Request) -> float:
        """Tokens that a new request will generate in all, from 1 to its `max_tokens`."""
        ...

    def observe(self, request: Request) -> None:
        """A request has ended by itself, or at its `max_tokens`; its generated ids are all there."""
        ...


class ClientBound:
    """What the client said: `max_tokens`. The only one that is never too low."""

    name = "bound"

    def predict(self, request: Request) -> float:
        """The client's bound."""
        return float(request.params.max_tokens)

    def observe(self, request: Request) -> None:
        """Learns nothing."""


class RunningQuantiles:
    """A quantile of the last lengths of requests whose prompts were about as long; the median, unless told otherwise.

    A class holds prompts of `2**k` to `2**(k+1) - 1` tokens. Until `enough` of it have ended, the client's bound holds.
    A request that was cut off at its `max_tokens` counts as that long, though it wanted more; one that a stop string of
    the text ended is never seen, since the engine takes that for an abort.

    Memory: two numbers for each of at most `window` lengths in each class, and there are at most 31 classes below
    2^31 tokens.

    Args:
        quantile: the share of lengths that are at most as long as the guess (nearest rank), in (0, 1].
        window: lengths of each class that count, the latest.
        enough: of them, before the guess is believed.
    """

    name = "quantiles"

    def __init__(self, quantile: float = 0.5, *, window: int = WINDOW, enough: int = ENOUGH) -> None:
        assert 0 < quantile <= 1 and 1 <= enough <= window, "no such quantile, or one that is never believed"
        self._quantile = quantile
        self._window = window
        self._enough = enough
        self._seen: dict[int, tuple[deque[int], list[int]]] = {}  # class -> lengths as they came, and sorted

    def predict(self, request: Request) -> float:
        """The quantile of the prompt's class, at most the client's bound."""
        _, ordered = self._seen.get(_class_of(request), (None, []))
        most = request.params.max_tokens
        if len(ordered) < self._enough:
            return float(most)
        return float(min(ordered[ceil(self._quantile * len(ordered)) - 1], most))

    def observe(self, request: Request) -> None:
        """Count its length, and forget the oldest of its class where there are too many."""
        came, ordered = self._seen.setdefault(_class_of(request), (deque(), []))
        length = len(request.generated_ids)
        came.append(length)
        insort(ordered, length)
        if len(came) > self._window:
            del ordered[bisect_left(ordered, came.popleft())]


class Oracle:
    """Lengths that are known beforehand, by request id: for experiments, and for replays of what has happened.

    Args:
        lengths: tokens; every request that will come is there.
        name: where they come from.
    """

    def __init__(self, lengths: Mapping[str, float], name: str = "oracle") -> None:
        self.name = name
        self._lengths = lengths

    def predict(self, request: Request) -> float:
        """What is known. Raises KeyError for a request of which nothing is."""
        return _within(self._lengths[request.request_id], request)

    def observe(self, request: Request) -> None:
        """Learns nothing."""


class Scored:
    """Whatever a function says of the prompt, such as a model that was trained on earlier requests.

    Args:
        score: prompt ids -> tokens. It is called once for each request, in the engine's thread, and must be quick.
        name: what the function is.
    """

    def __init__(self, score: Callable[[Sequence[int]], float], name: str = "learned") -> None:
        self.name = name
        self._score = score

    def predict(self, request: Request) -> float:
        """The function's word, between 1 and the client's bound."""
        return _within(self._score(request.prompt_ids), request)

    def observe(self, request: Request) -> None:
        """Learns nothing: it was trained before."""


def _class_of(request: Request) -> int:
    return len(request.prompt_ids).bit_length()


def _within(length: float, request: Request) -> float:
    return min(max(1.0, length), float(request.params.max_tokens))
