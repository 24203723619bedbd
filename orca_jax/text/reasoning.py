"""Separates what a model thinks from its answer, by the tags around it."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from orca_jax.text.calls.parts import OutputPart, Reasoning, ToolParser
from orca_jax.text.composed import composed, literal
from orca_jax.text.json_end import BLANKS
from orca_jax.values.request import StructuredOutput


class ThinkTags(NamedTuple):
    """The texts around the reasoning of a model."""

    start: str
    end: str


_THINK = ThinkTags("<think>", "</think>")
TAGS: Mapping[str, ThinkTags] = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "qwen3"), _THINK
    ),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
}
"""The tags by vLLM's names of the parsers."""

MESSAGES = "openai_gptoss"
"""vLLM's name for the reasoning of gpt-oss, which is not in tags."""

PARSERS = (*TAGS, MESSAGES, "none")
"""The names of parsers of reasoning."""

Opening = Literal["open", "free", "closed"]
"""The begin of an answer: within the reasoning, or after it; "free" if the model decides."""


def tags_of(name: str | None, template: str) -> ThinkTags | None:
    """Return the tags of a parser, or without a name those that a chat template shows; None for "none"."""
    if name is None:
        return inferred_tags(template)
    return TAGS.get(name)


def inferred_tags(template: str) -> ThinkTags | None:
    """Return the tags that a chat template writes, or None if it has none, or those of several models."""
    found = {tags for tags in TAGS.values() if tags.start in template and tags.end in template}
    if len(found) == 1:
        return found.pop()
    return None


def opening_of(prompt: str, tags: ThinkTags, continues: bool) -> Opening:
    """Return where the answer to a prompt begins. `continues` is True if the prompt ends within a message."""
    text = prompt.rstrip(BLANKS)
    if text.endswith(tags.start):
        return "open"
    if continues:
        return "open" if text.rfind(tags.start) > text.rfind(tags.end) else "closed"
    return "closed" if text.endswith(tags.end) else "free"


def thinking_first(
    answer: StructuredOutput, tags: ThinkTags, opening: Opening, specials: Mapping[str, int]
) -> StructuredOutput:
    """Return the constraint on an answer, after reasoning of any form.

    Args:
        answer: the constraint on the text after the end tag and up to two line breaks.
        tags: the texts around the reasoning.
        opening: where the text begins; with "free" it may have no reasoning.
        specials: the id of each special token by its text.
    """
    if opening == "closed":
        return answer
    start, end = (literal(tag, specials) for tag in tags)
    thought = f"thought: TEXT? {end}" if tags.end in specials else f"thought[lazy]: ANY {end}"
    begin = "thought" if opening == "open" else f"({start} thought)?"
    lark = f'start: {begin} "\\n"? "\\n"? @answer\n{thought}\nTEXT: /(?s:.+)/\nANY: /(?s:.*)/\n'
    return composed(lark, {"answer": answer})


class ReasoningParser:
    """A parser for text that begins with reasoning. The rest goes to the parser of calls, if there is one.

    The tags, and the blanks around reasoning and before the answer, are left out. Reasoning may have no end.

    Attributes:
        is_open: True up to the end of the reasoning, or to the first other text.
        is_inside: True within the reasoning.
    """

    def __init__(self, tags: ThinkTags, opening: Opening, calls: ToolParser | None) -> None:
        self.is_open = opening != "closed"
        self._tags = tags
        self._calls = calls
        self.is_inside = opening == "open"
        self._has_words = False  # of the reasoning, or of the answer after it
        self._is_after = False  # blanks before the answer are left out
        self._blanks: list[str] = []  # held back: they may be the last ones of the reasoning
        self._held = ""  # the beginning of a tag, after these blanks

    def push(self, text: str) -> Sequence[OutputPart]:
        """Add a piece of text, and return the decided pieces."""
        if not self.is_open:
            return self._answer(text)
        if not self.is_inside and not self._held:
            begun = text.lstrip(BLANKS)
            self._blanks.append(text[: len(text) - len(begun)])
            text = begun
        text = self._held + text
        self._held = ""
        if self.is_inside:
            return self._think(text)
        if self._tags.start.startswith(text):  # the beginning of the tag, or nothing
            self._held = text
            return []
        if not text.startswith(self._tags.start):
            self.is_open = False
            return self._answer(self._after_blanks(text))
        self.is_inside = True
        self._blanks.clear()
        return self._think(text.removeprefix(self._tags.start))

    def finish(self) -> Sequence[OutputPart]:
        """Return the rest at the end of the text."""
        held = self._held
        self._held = ""
        if self.is_open and self.is_inside:
            if held:
                return [Reasoning(self._after_blanks(held))]
            return []
        held = self._after_blanks(held)
        parts = list(self._answer(held)) if held else []
        if self._calls is None:
            return parts
        return [*parts, *self._calls.finish()]

    def _think(self, text: str) -> list[OutputPart]:
        """Read text within the reasoning. Blanks before other text are read once, however many pieces they have."""
        if not self._has_words:
            text = text.lstrip(BLANKS)
        thought, end, rest = text.partition(self._tags.end)
        if not end:
            thought = text[: len(text) - _begun(text, self._tags.end)]
            self._held = text[len(thought) :]
        words = thought.rstrip(BLANKS)
        shown: list[OutputPart] = [Reasoning(self._after_blanks(words))] if words else []
        if not end:
            self._has_words = self._has_words or bool(words)
            self._blanks.append(thought[len(words) :])
            return shown
        self._blanks.clear()
        self.is_open = self.is_inside = self._has_words = False
        self._is_after = True
        return [*shown, *self._answer(rest)]

    def _after_blanks(self, text: str) -> str:
        """The text after the blanks before it, which are held no longer."""
        whole = "".join([*self._blanks, text])
        self._blanks.clear()
        return whole

    def _answer(self, text: str) -> Sequence[OutputPart]:
        if self._is_after:
            text = text.lstrip(BLANKS)
            self._is_after = not text
        if not text:
            return []
        if self._calls is None:
            return [text]
        return self._calls.push(text)


def _begun(text: str, tag: str) -> int:
    """Return the length of the longest beginning of `tag` at the end of `text`."""
    longest = min(len(tag) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
