"""A length predictor of a class from outside."""

from orca_jax.policy.jobs import PolicyRequest
from orca_jax.policy.protocol import LengthPredictor
from orca_jax.sched.request import Request


class PolicyPredictor:
    """`sched.pool.Predictor` over a `policy.LengthPredictor`.

    Args:
        predictor: predicts.
        name: name of the predictor.
    """

    def __init__(self, predictor: LengthPredictor, name: str) -> None:
        self.name = name
        self._predictor = predictor
        self.refresh = predictor.refresh

    def predict(self, request: Request) -> float:
        """The predicted number of generated tokens, at least 1 and at most the request's `max_tokens`."""
        ids = [*request.prompt_ids, *request.generated_ids]
        predicted = self._predictor.predict(PolicyRequest(request), ids)
        return float(min(max(predicted, 1, len(request.generated_ids)), request.params.max_tokens))

    def observe(self, request: Request) -> None:
        """Let it learn from an ended request."""
        self._predictor.observe(PolicyRequest(request), len(request.generated_ids))
