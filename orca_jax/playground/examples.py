"""Questions to try, which the served model answers."""

from orca_jax.bundled import DEMO
from orca_jax.openai.model import Service

_OF_THE_DEMO = (
    "Tom has 3 apples and buys 4. How many does he have?",
    "What is iteration-level scheduling?",
    "Juan had 5 shirts and gave 2 away. How many? Reply with JSON.",
)
_CHATS = (
    "How many days are in a week?",
    "Write a short list of three fruits.",
    "What is the opposite of hot?",
)
_PROMPTS = ("Once upon a time", "The capital of France is", "One, two, three, four,")


def examples(service: Service) -> dict[str, tuple[str, ...]]:
    """Return three questions and three beginnings of a text."""
    return {"chat": _OF_THE_DEMO if service.config.engine.model == DEMO else _CHATS, "prompt": _PROMPTS}
