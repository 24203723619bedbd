"""Chats and texts for the model `smollm2`: those of test_smollm2.py, recorded by scripts/record_smollm2.py.

This module needs the standard library alone, and runs on Python 3.11 too.
"""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

RECORD = Path(__file__).parents[1] / "fixtures" / "smollm2.json"
NEW = 64
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Name three colours of the rainbow.",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "Explain what a transformer is in machine learning.",
    "Give me a recipe for pancakes.",
    "What is 7 plus 5?",
    "Write a Python function that returns the larger of two numbers.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "List the planets of the solar system.",
    "Summarise in one sentence: the cat sat on the mat and looked at the rain until the sun came out again.",
    "What do bees make?",
    "Tell me a story about a robot that learns to paint.",
    "How many days does a week have?",
)
SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
TURNS = (
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada! How can I help you today?"},
)
CHATS: list[list[dict[str, str]]] = [
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    *(
        [SYSTEM, {"role": "user", "content": question}]
        for question in (QUESTIONS[4], QUESTIONS[13])
    ),
    [*TURNS, {"role": "user", "content": "What is my name?"}],
    [
        *TURNS,
        {
            "role": "user",
            "content": "Write me a letter to a friend about a walk in the woods. Be detailed.",
        },
    ],
]
TEXTS = (
    "", " ", "   ", "\n\n\n", "a\n \n  b\t\tc", "Hello world", " leading  and   many    blanks ", "x" * 50,
    "It's 2026; they'll pay $1,234.50!", "WE'RE DON'T i'm", "naïve café Ünïcödé — “quotes”", "e\u0301 composed",
    "日本語のテキスト、中文 한국어", "مرحبا بالعالم", "def f(x):\n\treturn x**2\n\n\n# end\r\n", "ﬁ ½ ² ١٢٣",
    "emoji 🙂👩‍👩‍👧 and \u200bzero", "<|im_start|>user\nHi<|im_end|>\n",
)  # fmt: skip
CHARACTERS = "aAbBzZ019 \n\r\t.,;:!?'’\"-_/()[]{}<>|#$%=+*&@\\^~`éßñøžłαβЖяשם中文日本語한국\u200b\u0301\u00a0🙂👍🏽½²١"


def texts(vocabulary: Sequence[str]) -> list[str]:
    """1,000 texts: the listed ones, drawn pieces of a vocabulary, drawn characters, and both."""
    draw = random.Random(0)
    found = list(TEXTS)
    while len(found) < 1000:
        parts = [draw.choice(vocabulary) for _ in range(draw.randrange(12))]
        parts += [
            "".join(draw.choice(CHARACTERS) for _ in range(draw.randrange(8)))
            for _ in range(draw.randrange(4))
        ]
        draw.shuffle(parts)
        found.append("".join(parts))
    return found


def digest(ids: Sequence[int]) -> str:
    """A short name of a list of ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:8]
