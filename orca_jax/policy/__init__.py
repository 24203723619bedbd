"""Write a scheduler, an order, a length predictor or a retention of your own.

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
    Retention,
)
from orca_jax.sched.prefixes.spans import Keeping, KeptSpan

__all__ = [
    "API",
    "Decision",
    "Keeping",
    "KeptSpan",
    "LengthPredictor",
    "Order",
    "Ordered",
    "Policy",
    "PolicyView",
    "RequestView",
    "Retention",
]
