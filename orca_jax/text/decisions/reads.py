"""Reads: requests for one token, whose given ids are scored; and the answers made from their scores."""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from orca_jax.text.decisions.labels import AnswerLabels, LabelFinder
from orca_jax.text.decisions.questions import Question, QuestionKind
from orca_jax.values.errors import RequestError
from orca_jax.values.request import Range, SamplingParams, TokenLogprobs

OptionOrder = Literal["given", "averaged"]
"""The order of options: as given, or an average over several rotations of lettered options."""

TEMPERATURE = Range(0, 100, excludes_low=True)  # that divides log probabilities of labels
MAX_READS = 4096  # of a call
MAX_READ_TOKENS = 2 * 2**20  # of all prompts of a call together


class Fitted(NamedTuple):
    """A calibration of one kind of question.

    Attributes:
        temperature: divides the log probabilities of the labels.
        bias: subtracted from the log probability of each label before that; labels without one have 0.
    """

    temperature: float = 1.0
    bias: tuple[float, ...] = ()


FitsByKind = Mapping[QuestionKind, Fitted]
"""A calibration by kind of question; kinds without one are left as they are."""


class Read(NamedTuple):
    """A request for one token."""

    prompt_ids: list[int]
    ids: tuple[int, ...]  # to score

    def params(self, shared: int, salt: str) -> SamplingParams:
        """The parameters of a read. Only reads with the same salt share their first `shared` tokens."""
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprob_token_ids=self.ids,
            shared_tokens=shared,
            cache_salt=salt,
        )


@dataclass(frozen=True)
class TypedAnswer:
    """The answer to a question.

    Attributes:
        question: the question.
        probabilities: of its options in the order given; they sum to one.
        label_mass: the probability that the model gives to all labels together, before any other token. The mean of
            several reads.
        flips: orders of the options in which another option is the most probable one.
        num_orders: orders of the options that were read.
        are_single: True if each label is a single token; else their log probabilities are sums.
        is_calibrated: True if a calibration was used.
    """

    question: Question
    probabilities: tuple[float, ...]
    label_mass: float
    flips: int = 0
    num_orders: int = 1
    are_single: bool = True
    is_calibrated: bool = False

    @property
    def best(self) -> int:
        """The index of the most probable option; the first one of equals."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def answer(self) -> str:
        """The name of the most probable option."""
        return self.question.options[self.best].name

    @property
    def yes(self) -> float:
        """The probability of the second option: of yes."""
        return self.probabilities[1]

    @property
    def score(self) -> float:
        """The expected index of the option."""
        return sum(index * each for index, each in enumerate(self.probabilities))

    @property
    def margin(self) -> float:
        """The confidence by TypeSafe's formulas: 0 for equal probabilities, 1 for certainty."""
        number = len(self.probabilities)
        if number == 1:
            return 1.0
        if self.question.kind == "score":
            middle = (number - 1) / 2
            spread = sum(abs(index - middle) for index in range(number)) / number
            off = sum(
                each * abs(index - self.best) for index, each in enumerate(self.probabilities)
            )
            return max(0.0, 1 - off / spread)
        return (number * max(self.probabilities) - 1) / (number - 1)

    @property
    def top_mass(self) -> float:
        """The confidence by vLLM's formula: the largest probability times the label mass."""
        return max(self.probabilities) * self.label_mass


@dataclass(frozen=True)
class Readout:
    """The reads of a call, and the way from their scores to answers.

    Attributes:
        questions: the questions.
        reads: the requests of all questions, in order.
        shared: tokens that all prompts begin with.
    """

    questions: Sequence[Question]
    reads: Sequence[Read]
    shared: int
    labels: Sequence[AnswerLabels] = field(repr=False)
    rotations: Sequence[Sequence[int]] = field(repr=False)

    @property
    def num_reads(self) -> list[int]:
        """The number of reads of each question."""
        pairs = zip(self.labels, self.rotations, strict=True)
        return [len(labels.following) * len(rotations) for labels, rotations in pairs]

    def decisions(
        self,
        scores: Sequence[TokenLogprobs],
        temperature: float = 1.0,
        calibration: FitsByKind | None = None,
    ) -> list[TypedAnswer]:
        """The answers, in the order of the questions.

        Args:
            scores: the result of each read.
            temperature: divides the log probabilities of all labels; calibration comes first.
            calibration: that of each kind; None: none.
        """
        left = iter(scores)
        found = []
        for question, labels, rotations in zip(
            self.questions, self.labels, self.rotations, strict=True
        ):
            by_rotation = []
            for _ in rotations:
                by_prefix = {begun: next(left) for begun in labels.following}
                by_rotation.append(_masses(labels, by_prefix))
            fitted = None if calibration is None else calibration.get(question.kind)
            one = _decision(question, by_rotation, rotations, fitted, temperature)
            found.append(replace(one, are_single=labels.are_single))
        return found


def reading(
    questions: Sequence[Question],
    state_ids: Sequence[int],
    encode: Callable[[str], list[int]],
    labels: LabelFinder,
    order: OptionOrder = "given",
) -> Readout:
    """The reads of questions about a state.

    Args:
        questions: at least one.
        state_ids: the tokens of the text before each question.
        encode: the tokens of the text of a question, with what follows it.
        labels: finds the labels at the end of this text.
        order: the order of the options.

    Raises:
        RequestError: there are too many reads; `param` is "questions".
    """
    reads: list[Read] = []
    found: list[AnswerLabels] = []
    rotations: list[Sequence[int]] = []
    num_tokens = 0
    for question in questions:
        own = labels.find(question.alphabet, len(question.options))
        turns = question.rotations if order == "averaged" else (0,)
        for rotation in turns:
            prompt = [*state_ids, *encode(question.prompt(own.texts, rotation))]
            for begun, ids in own.following.items():
                reads.append(Read([*prompt, *begun], ids))
                num_tokens += len(reads[-1].prompt_ids)
            _check_size(len(reads), num_tokens)
        found.append(own)
        rotations.append(turns)
    return Readout(questions, reads, len(state_ids), found, rotations)


def check_call(questions: Sequence[Question], order: object, temperature: object) -> None:
    """Raise RequestError for a call without questions, or with an unknown order or temperature."""
    if not questions:
        raise RequestError("questions must have at least one question", param="questions")
    if order not in get_args(OptionOrder):
        raise RequestError(
            f"order must be one of {', '.join(get_args(OptionOrder))}, got {order!r}", param="order"
        )
    if not TEMPERATURE.has(temperature):
        message = f"temperature must be {TEMPERATURE.text}, got {temperature!r}"
        raise RequestError(message, param="temperature")


def _check_size(num_reads: int, num_tokens: int) -> None:
    if num_reads <= MAX_READS and num_tokens <= MAX_READ_TOKENS:
        return
    message = (
        f"questions need more than {MAX_READS} reads or {MAX_READ_TOKENS} tokens in all prompts; send fewer questions, "
        "fewer options, or a shorter state"
    )
    raise RequestError(message, param="questions")


class _Masses(NamedTuple):
    """One read of a question: the log probability of each label, and the mass of all of them."""

    logprobs: Sequence[float]
    label_mass: float


def _masses(labels: AnswerLabels, scores: Mapping[tuple[int, ...], TokenLogprobs]) -> _Masses:
    logprobs = [_label_logprob(ids, scores) for ids in labels.ids]
    mass = math.fsum(map(math.exp, logprobs))
    if labels.are_single:
        # the sum of both is one but for rounding, so small masses and large ones are exact
        return _Masses(logprobs, mass / (mass + (scores[()].others or 0.0)))
    return _Masses(logprobs, min(1.0, mass))


def _label_logprob(ids: tuple[int, ...], scores: Mapping[tuple[int, ...], TokenLogprobs]) -> float:
    """The log probability of a label: the sum over its tokens."""
    total = 0.0
    for end, token in enumerate(ids):
        one = scores[ids[:end]]
        total += one.top_logprobs[one.top_ids.index(token)]
    return total


def _decision(
    question: Question,
    by_rotation: Sequence[_Masses],
    rotations: Sequence[int],
    fitted: Fitted | None,
    temperature: float,
) -> TypedAnswer:
    """The mean over the reads of a question."""
    number = len(question.options)
    calibration = fitted or Fitted()
    bias = [*calibration.bias[:number], *[0.0] * (number - len(calibration.bias))]
    found = []
    for rotation, read in zip(rotations, by_rotation, strict=True):
        shifted = [each - off for each, off in zip(read.logprobs, bias, strict=True)]
        by_label = softmax(shifted, temperature * calibration.temperature)
        found.append([by_label[(index - rotation) % number] for index in range(number)])
    mean = [math.fsum(column) / len(found) for column in zip(*found, strict=True)]
    best = mean.index(max(mean))
    return TypedAnswer(
        question,
        tuple(mean),
        label_mass=math.fsum(read.label_mass for read in by_rotation) / len(found),
        num_orders=len(found),
        flips=sum(each.index(max(each)) != best for each in found),
        is_calibrated=fitted is not None,
    )


def own_salt(salt: str, *, reuses_prefixes: bool) -> str:
    """The salt of a call: its own one if nothing may be reused between calls."""
    return salt if reuses_prefixes else f"{salt}\n{uuid.uuid4().hex}"


def softmax(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities from log probabilities of any sum, in float64."""
    top = max(logprobs)
    masses = [math.exp((each - top) / temperature) for each in logprobs]
    total = math.fsum(masses)
    return [each / total for each in masses]
