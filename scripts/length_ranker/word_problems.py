"""Questions for the demo model. Its answers end by themselves, and their lengths depend on the prompt."""

import json
from collections.abc import Sequence
from pathlib import Path

from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.errors import ConfigError

# the demo was trained with these
_PLAIN_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})


def read_questions(path: str) -> list[str]:
    """The questions of a file of JSON lines, each with a `question`.

    Raises:
        ConfigError: the file cannot be read, or a line has no question.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [
            str(json.loads(line)["question"]).strip().translate(_PLAIN_QUOTES)
            for line in lines
            if line.strip()
        ]
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error.strerror}", param="questions"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path!r} has a line that is not JSON with a `question`: {error}", "questions"
        ) from error


def prompts_of(questions: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each question as one user message, by the demo's chat template."""
    return [tokenizer.encode(f"<|user|>{question}<|assistant|>") for question in questions]
