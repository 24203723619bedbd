"""A log of requests as arrays."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from orca_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Log:
    """Ended requests, padded to the longest prompt. N requests, T tokens of a prompt."""

    ids: np.ndarray  # int32 [N, T]
    is_token: np.ndarray  # bool [N, T]
    lengths: np.ndarray  # float32 [N]: generated tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, which: np.ndarray) -> "Log":
        """The requests at the indices `which`."""
        return Log(self.ids[which], self.is_token[which], self.lengths[which])

    def split(self, share: float, seed: int) -> tuple["Log", "Log"]:
        """Split off a random share of the requests; returns the rest and the share."""
        order = np.random.default_rng(seed).permutation(len(self))
        cut = max(1, int(share * len(self)))
        return self.select(order[cut:]), self.select(order[:cut])


def read_log(paths: Sequence[Path], tokenizer: Tokenizer) -> Log:
    """Read JSON lines with `prompt_ids`, or a text as `prompt`, and `generated`.

    Raises:
        ValueError: a line has neither, or the files hold fewer than 64 requests.
    """
    prompts, lengths = [], []
    for prompt, length in chain.from_iterable(_lines(path, tokenizer) for path in paths):
        prompts.append(prompt)
        lengths.append(length)
    if len(prompts) < 64:
        raise ValueError(
            f"{len(prompts)} requests are too few to learn from; log at least 64, better thousands"
        )
    sizes = np.array([len(prompt) for prompt in prompts])
    is_token = np.arange(sizes.max())[None, :] < sizes[:, None]
    ids = np.zeros(is_token.shape, np.int32)
    ids[is_token] = np.concatenate(prompts)
    return Log(ids, is_token, np.asarray(lengths, np.float32))


def _lines(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            prompt = (
                line["prompt_ids"] if "prompt_ids" in line else tokenizer.encode(line["prompt"])
            )
            length = int(line["generated"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} needs prompt_ids or prompt, and generated: {error!r}"
            ) from error
        if prompt and length > 0:
            yield prompt, length
