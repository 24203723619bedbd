"""Write a scheduler, an order or a length predictor of your own.

The engine calls it between two iterations. It never sees the engine's own objects: it reads a `PolicyView` with
`RequestView`s, and returns a `Decision`.
"""

from orca_jax.policy.ordered import Ordered
from orca_jax.policy.protocol import (
    API,
    Decision,
    LengthPredictor,
    Order,
    Policy,
    PolicyView,
    RequestView,
)

__all__ = [
    "API",
    "Decision",
    "LengthPredictor",
    "Order",
    "Ordered",
    "Policy",
    "PolicyView",
    "RequestView",
]
