"""How long will a request really run? Nobody knows; these guess, when it arrives.

Orderings and check-in intervals read the guess from `Request.predicted_output`. It decides who goes first and how often
one looks, never what is generated: a wrong guess costs time and nothing else.
"""

from typing import Protocol

from orca_jax.request import Request


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
