"""A length predictor of a class from outside."""

from collections.abc import Sequence
from math import isnan

from orca_jax.policy.errors import PolicyError, calling, number_of
from orca_jax.policy.jobs import PolicyRequest
from orca_jax.policy.protocol import LengthPredictor
from orca_jax.sched.request import Request


class PolicyPredictor:
    """`sched.predict.EnginePredictor` over a `policy.LengthPredictor`.

    Args:
        predictor: predicts.
        name: name of the predictor.
    """

    def __init__(self, predictor: LengthPredictor, name: str) -> None:
        self.name = name
        self._predictor = predictor
        self.refresh = predictor.refresh

    def predict(self, request: Request, ids: Sequence[int]) -> float:
        """The predicted number of generated tokens, at least 1 and at most the request's `max_tokens`.

        Raises:
            PolicyError: the class raised an exception, or did not return a number.
        """
        with calling(self.name, "predict"):
            predicted = self._predictor.predict(PolicyRequest(request), [*ids])
        length = number_of(predicted)
        if isnan(length):
            raise PolicyError(
                self.name, f"predict returned {predicted!r} instead of a number of tokens"
            )
        return float(min(max(length, 1, len(request.generated_ids)), request.params.max_tokens))

    def observe(self, request: Request, length: int) -> None:
        """Let it learn from an ended request. Raises PolicyError if it raises an exception."""
        with calling(self.name, "observe"):
            self._predictor.observe(PolicyRequest(request), length)
