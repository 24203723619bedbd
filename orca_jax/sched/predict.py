"""Predictions of output lengths, made when requests arrive.

Orderings read the prediction in `Request.predicted_output`. It changes the order of requests, never their tokens: a
wrong prediction costs time and nothing else.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import ClassVar, Protocol

from orca_jax.sched.request import Request

WINDOW = 256  # lengths remembered in each class
ENOUGH = 16  # lengths in a class before their quantile is used


class Predictor[R](Protocol):
    """Predicts output lengths, and may learn from ended requests.

    `R` is a request of the engine, or for classes from outside a view of it (`policy.LengthPredictor`).
    """

    @property
    def refresh(self) -> int | None:
        """Generated tokens between two predictions for a request; None: one prediction, at its arrival."""
        ...

    def predict(self, request: R, ids: Sequence[int], /) -> float:
        """The number of generated tokens in all, given the ids of prompt and generated text so far.

        Predictors of the engine stay between 1 and the request's `max_tokens`.
        """
        ...

    def observe(self, request: R, length: int, /) -> None:
        """Learn from a request that has ended after `length` generated tokens, by itself or at its `max_tokens`."""
        ...


class EnginePredictor(Predictor[Request], Protocol):
    """A predictor for the pool of requests."""


class RunningQuantiles:
    """Predicts a quantile of the latest lengths of requests with prompts of similar length; by default the median.

    A class holds prompts of `2**k` to `2**(k+1) - 1` tokens. Until `enough` of its requests have ended, the client's
    bound is the prediction. A request cut off at its `max_tokens` counts with that length. A request ended by a stop
    string of the text is not observed, since the engine sees an abort.

    Memory: two numbers for each length, at most `window` lengths in each class, and at most 31 classes below 2^31
    tokens.

    Args:
        quantile: the share of lengths not above the prediction (nearest rank), in (0, 1].
        window: the number of latest lengths kept in each class.
        enough: the number of lengths in a class before their quantile is used.
    """

    refresh: ClassVar[int | None] = None

    def __init__(
        self, quantile: float = 0.5, *, window: int = WINDOW, enough: int = ENOUGH
    ) -> None:
        assert 0 < quantile <= 1 and 1 <= enough <= window, (
            "quantile must be in (0, 1], and enough from 1 to window"
        )
        self._quantile = quantile
        self._window = window
        self._enough = enough
        # class -> lengths in order of observation, and sorted
        self._seen: dict[int, tuple[deque[int], list[int]]] = {}

    def predict(self, request: Request, ids: Sequence[int]) -> float:
        """The quantile of the prompt's class, at most the client's bound."""
        _, ordered = self._seen.get(_class_of(request), (None, []))
        most = request.params.max_tokens
        if len(ordered) < self._enough:
            return float(most)
        return float(min(ordered[ceil(self._quantile * len(ordered)) - 1], most))

    def observe(self, request: Request, length: int) -> None:
        """Add the request's length, and drop the oldest one of its class if there are too many."""
        came, ordered = self._seen.setdefault(_class_of(request), (deque(), []))
        came.append(length)
        insort(ordered, length)
        if len(came) > self._window:
            del ordered[bisect_left(ordered, came.popleft())]


class Oracle:
    """Predicts lengths known beforehand, by request id: for experiments, and for replays of earlier runs.

    Args:
        lengths: request id -> tokens, for every request to come.
    """

    refresh: ClassVar[int | None] = None

    def __init__(self, lengths: Mapping[str, float]) -> None:
        self._lengths = lengths

    def predict(self, request: Request, ids: Sequence[int]) -> float:
        """The known length, between 1 and the client's bound. Raises KeyError for an unknown request."""
        return _within(self._lengths[request.request_id], request)

    def observe(self, request: Request, length: int) -> None:
        """Does nothing: all lengths are known."""


class Score(Protocol):
    """Predicts lengths of answers to prompts of one vocabulary.

    Attributes:
        vocab_size: the number of ids.
    """

    vocab_size: int

    def __call__(self, prompt_ids: Sequence[int]) -> float:
        """Return the length of an answer in tokens."""
        ...


class Scored:
    """Predicts by a function of the prompt, such as a model trained on earlier requests.

    Args:
        score: prompt ids -> tokens. It is called once for each request, in the engine's thread, and must be quick.
    """

    refresh: ClassVar[int | None] = None

    def __init__(self, score: Callable[[Sequence[int]], float]) -> None:
        self._score = score

    def predict(self, request: Request, ids: Sequence[int]) -> float:
        """The function's value, between 1 and the client's bound."""
        return _within(self._score(request.prompt_ids), request)

    def observe(self, request: Request, length: int) -> None:
        """Does nothing: the function was trained before."""


def _class_of(request: Request) -> int:
    return len(request.prompt_ids).bit_length()


def _within(length: float, request: Request) -> float:
    return min(max(1.0, length), float(request.params.max_tokens))
