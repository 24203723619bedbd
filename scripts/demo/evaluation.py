"""The held-out tasks, answered through the engine by greedy decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from demo.tasks import mixture
from demo.tasks.example import Conversation, Example
from orca_jax.llm import LLM
from orca_jax.values.request import SamplingParams

MAX_TOKENS = 200
SEED = 2  # other questions than those looked at during training

OPENINGS = ("The sea was", "Once there was", "The prince looked at her", "KING HENRY:\n")
NUM_SAMPLES = 20


@dataclass(frozen=True)
class Answered:
    """A turn of a conversation with the model's answer."""

    example: Example
    given: str

    @property
    def is_right(self) -> bool:
        """True if the answer is right, see `Example.is_right`."""
        return self.example.is_right(self.given)


@dataclass(frozen=True)
class Result:
    """The answers of one group; a conversation counts as right if each of its answers is."""

    answered: list[list[Answered]]

    @property
    def num_right(self) -> int:
        """The number of right conversations."""
        return sum(all(turn.is_right for turn in turns) for turns in self.answered)

    @property
    def share(self) -> float:
        """The share of right conversations."""
        return round(self.num_right / len(self.answered), 4)


def evaluate(llm: LLM, count: int, seed: int = SEED) -> dict[str, Result]:
    """Ask the questions of the test: `count` of each group, and all held-out questions about the engine."""
    groups = mixture.examination(count, seed)
    results: dict[str, Result] = {}
    turns: list[tuple[str, int, int]] = []
    for name, conversations in groups.items():
        results[name] = Result([[] for _ in conversations])
        for place, conversation in enumerate(conversations):
            turns += [(name, place, turn) for turn in range(len(conversation))]
    given = answers(llm, [(groups[name][place], turn) for name, place, turn in turns])
    for (name, place, turn), answer in zip(turns, given, strict=True):
        results[name].answered[place].append(Answered(groups[name][place][turn], answer))
    return results


def answers(llm: LLM, turns: Sequence[tuple[Conversation, int]]) -> list[str]:
    """The greedy answers to turns of conversations, each after the right answers to the turns before it."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.chat([_messages(conversation, turn) for conversation, turn in turns], params)
    return [output.outputs[0].text for output in outputs]


def _messages(conversation: Conversation, turn: int) -> list[dict[str, str]]:
    messages = []
    for example in conversation[:turn]:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer})
    return [*messages, {"role": "user", "content": conversation[turn].question}]


def samples(llm: LLM, results: dict[str, Result]) -> list[tuple[str, str]]:
    """Twenty prompts with their continuations: the first conversations of each group, then openings of texts."""
    found = []
    for depth in range(2):
        for result in results.values():
            turns = result.answered[depth]
            found.append(
                (
                    "".join(_as_text(turn) for turn in turns[:-1]) + turns[-1].example.question,
                    turns[-1].given,
                )
            )
    params = SamplingParams(temperature=0.0, max_tokens=60)
    openings = [
        (output.prompt or "", output.outputs[0].text)
        for output in llm.generate(list(OPENINGS), params)
    ]
    return found[: NUM_SAMPLES - len(openings)] + openings


def _as_text(turn: Answered) -> str:
    return f"{turn.example.question}\n-> {turn.given}\n"


def mistakes(results: dict[str, Result]) -> dict[str, list[tuple[str, str, str]]]:
    """The wrong answers of each group: question, answer given, right answer."""
    found = {}
    for name, result in results.items():
        wrong = [turn for turn in chain.from_iterable(result.answered) if not turn.is_right]
        found[name] = [(turn.example.question, turn.given, turn.example.answer) for turn in wrong]
    return found
