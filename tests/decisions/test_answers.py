"""Questions, labels and answers, on the toy model, whose probabilities are computable by hand."""

import asyncio
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from orca_jax import LLM, AsyncLLM, Question
from orca_jax.text.decisions.labels import LabelFinder
from orca_jax.text.decisions.prompts import marked
from orca_jax.text.decisions.reads import Fitted, TypedAnswer, softmax
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.errors import RequestError

SLOPE = 1 / 8  # of the toy's logits
QUESTIONS = [
    Question.yes_no("is it?"),
    Question.choice("which?", {"x": "the first", "y": None, "z": "the last"}),
    Question.score("how much?", ["low", "middle", "high"]),
]


class WordTokenizer(ByteTokenizer):
    """Bytes, and one token for each pair of letters whose first one is below M."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        place = 0
        while place < len(text):
            pair = text[place : place + 2]
            if len(pair) == 2 and "A" <= pair[0] < "M" and "A" <= pair[1] <= "Z":
                ids.append(1000 + 26 * (ord(pair[0]) - 65) + ord(pair[1]) - 65)
                place += 2
                continue
            ids.append(ord(text[place]))
            place += 1
        return ids


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("preset:toy", max_num_seqs=8, max_model_len=4096, page_size=16) as made:
        yield made
        made.engine.pool.check_integrity()
        assert not made.engine.has_work


def toy_logprobs(prompt: list[int], ids: list[int]) -> list[float]:
    favourite = sum((place + 1) * (token + 1) for place, token in enumerate(prompt)) % 257
    logits = [-((token - favourite) % 257) * SLOPE for token in range(257)]
    norm = math.log(math.fsum(map(math.exp, logits)))
    return [logits[token] - norm for token in ids]


def test_prompts_of_all_kinds() -> None:
    yes_no, choice, score = QUESTIONS
    assert yes_no.prompt(("no", "yes")) == (
        "Question: Is the following true? is it?\nAnswer with yes or no only."
    )
    assert Question.yes_no("a", yes="b", no="c").prompt(("no", "yes")).splitlines()[1:3] == [
        "yes: b",
        "no: c",
    ]
    assert choice.prompt("ABC") == (
        "Question: which?\nA: x - the first\nB: y\nC: z - the last\nAnswer with the letter of one option only."
    )
    assert choice.prompt("ABC", 2).splitlines()[1:4] == [
        "A: z - the last",
        "B: x - the first",
        "C: y",
    ]
    assert score.prompt("012").splitlines()[1:] == [
        "0: low",
        "1: middle",
        "2: high",
        "Answer with the number of one level only.",
    ]


def test_decisions_of_the_toy(llm: LLM) -> None:
    reading = llm._decision_texts.reading("state", QUESTIONS, "given", 1.0, None, None)
    read = reading.reads[4]  # the first question has four: of each beginning of yes and of no
    text = bytes(read.prompt_ids).decode()
    assert text == f"user: state\n\n{QUESTIONS[1].prompt('ABC')}\nassistant:"
    assert reading.shared == len("user: state\n\n")
    decisions = llm.decide("state", QUESTIONS)
    choice = decisions[1]
    logprobs = toy_logprobs(read.prompt_ids, list(b"ABC"))
    assert choice.probabilities == pytest.approx(softmax(logprobs))
    assert choice.label_mass == pytest.approx(sum(map(math.exp, logprobs)))
    assert choice.answer == "xyz"[choice.probabilities.index(max(choice.probabilities))]
    assert choice.are_single
    assert sum(choice.probabilities) == pytest.approx(1)
    assert decisions[0].question.options[1].name == "yes"
    assert not decisions[0].are_single, "the words have several bytes"
    assert decisions[2].score == pytest.approx(
        decisions[2].probabilities[1] + 2 * decisions[2].probabilities[2]
    )


def test_several_tokens_a_label_are_the_sum_of_their_log_probabilities(llm: LLM) -> None:
    reading = llm._decision_texts.reading("s", QUESTIONS[:1], "given", 1.0, None, None)
    prompt = reading.reads[0].prompt_ids
    sums = [
        math.fsum(
            toy_logprobs(prompt + list(word[:end]), [word[end]])[0] for end in range(len(word))
        )
        for word in (b"no", b"yes")
    ]
    (one,) = llm.decide("s", QUESTIONS[:1])
    assert one.probabilities == pytest.approx(softmax(sums))
    assert one.label_mass == pytest.approx(sum(map(math.exp, sums)))


def test_temperature_and_calibration(llm: LLM) -> None:
    (plain,) = llm.decide("s", QUESTIONS[1:2])
    (hot,) = llm.decide("s", QUESTIONS[1:2], temperature=2.0)
    assert hot.probabilities == pytest.approx(
        softmax([math.log(p) for p in plain.probabilities], 2)
    )
    assert hot.label_mass == plain.label_mass
    fitted = {"choice": Fitted(0.5, (0.0, 1.0))}
    (own, other) = llm.decide("s", QUESTIONS[1:], calibration=fitted)  # type: ignore[arg-type]
    shifted = [math.log(p) - off for p, off in zip(plain.probabilities, (0, 1, 0), strict=True)]
    assert own.probabilities == pytest.approx(softmax(shifted, 0.5))
    assert (own.is_calibrated, other.is_calibrated) == (True, False)


def test_an_average_over_all_rotations(llm: LLM) -> None:
    question = QUESTIONS[1]
    (one,) = llm.decide("s", [question], order="averaged")
    reading = llm._decision_texts.reading("s", [question], "averaged", 1.0, None, None)
    assert len(reading.reads) == 3
    found = []
    for rotation, read in enumerate(reading.reads):
        by_label = softmax(toy_logprobs(read.prompt_ids, list(b"ABC")))
        found.append([by_label[(index - rotation) % 3] for index in range(3)])
    mean = [sum(column) / 3 for column in zip(*found, strict=True)]
    assert one.probabilities == pytest.approx(mean)
    assert one.flips == sum(each.index(max(each)) != one.best for each in found)
    many = Question.choice("?", [str(index) for index in range(40)])
    assert list(many.rotations) == [0, 20]
    assert list(QUESTIONS[2].rotations) == [0], "levels have an order of their own"


@pytest.mark.parametrize(
    "probabilities, confidence",
    [((0.5, 0.5), 0.0), ((1.0, 0.0), 1.0), ((0.8, 0.1, 0.1), 0.7), ((1.0,), 1.0)],
)
def test_the_confidence_of_a_choice(probabilities: tuple[float, ...], confidence: float) -> None:
    question = Question.choice("?", "abc"[: len(probabilities)])
    one = TypedAnswer(question, probabilities, 0.5)
    assert one.margin == pytest.approx(confidence)
    assert one.top_mass == pytest.approx(max(probabilities) / 2)


def test_the_confidence_of_a_score() -> None:
    question = Question.score("?", ["a", "b", "c"])
    one = TypedAnswer(question, (0.1, 0.6, 0.3), 1.0)
    assert one.margin == pytest.approx(1 - 0.4 / (2 / 3))
    assert one.score == pytest.approx(1.2)


def test_labels_are_single_tokens_where_the_vocabulary_has_them() -> None:
    bytes_only = LabelFinder(ByteTokenizer(), "\nassistant:")
    assert bytes_only.find("letters", 26).are_single
    assert bytes_only.find("digits", 3).texts == ("0", "1", "2")
    assert not bytes_only.find("letters", 27).are_single
    words = LabelFinder(WordTokenizer(), "\nassistant:")
    assert words.find("letters", 255).are_single
    most = 12 * 26
    assert words.find("letters", most).texts[-1] == "LZ"
    too_many = words.find("letters", most + 1)
    assert not too_many.are_single
    assert too_many.following[()][0] == 1000


def test_a_label_that_joins_the_text_before_it_counts_by_itself() -> None:
    labels = LabelFinder(WordTokenizer(), "answer: A").find("letters", 2)
    assert labels.ids == [(65,), (66,)]


@pytest.mark.parametrize(
    "template, rendered, tail",
    [
        ("<think></think>", "MARK<a><think>\n", "<a><think>\n</think>\n\n"),
        ("<think></think>", "MARK<a><think>\n\n</think>\n\n", "<a><think>\n\n</think>\n\n"),
        ("", "MARK<a>", "<a>"),
        (
            "<|channel|><|message|>functions.",
            "MARK<|start|>assistant",
            "<|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
def test_a_thought_is_closed(template: str, rendered: str, tail: str) -> None:
    conversation = marked("state")
    frame = conversation.frame(rendered.replace("MARK", conversation.mark), template)
    assert frame.tail == tail


@pytest.mark.parametrize("rendered", ["", "MARK and MARK"])
def test_a_template_without_a_place_for_questions_is_refused(rendered: str) -> None:
    conversation = marked("state")
    with pytest.raises(RequestError) as caught:
        conversation.frame(rendered.replace("MARK", conversation.mark), "")
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    "arguments, param",
    [
        ({"questions": []}, "questions"),
        ({"order": "best"}, "order"),
        ({"temperature": 0}, "temperature"),
        ({"state": {1, 2}}, "state"),
        ({"state": [{"role": "assistant", "content": "x"}]}, "state"),
        ({"state": "x" * 5000}, "prompts[0]"),
        (
            {"questions": [Question.choice("?", [str(index) for index in range(255)])] * 100},
            "questions",
        ),
    ],
)
def test_wrong_arguments_are_named(llm: LLM, arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.decide(**{"state": "s", "questions": QUESTIONS, **arguments})
    assert caught.value.param == param


@pytest.mark.parametrize("number", [0, 256])
@pytest.mark.parametrize("kind", ["choice", "score"])
def test_numbers_of_options(kind: str, number: int) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(Question, kind)("?", [str(index) for index in range(number)])
    assert caught.value.param == ("options" if kind == "choice" else "levels")


def test_options_must_differ() -> None:
    with pytest.raises(RequestError, match="different"):
        Question.choice("?", ["a", "a"])


def test_a_conversation_and_json_are_states(llm: LLM) -> None:
    states = (
        [{"role": "system", "content": "be strict"}, {"role": "user", "content": "s"}],
        {"a": [1]},
    )
    texts = []
    for state in states:
        reading = llm._decision_texts.reading(state, QUESTIONS[:1], "given", 1.0, None, None)
        texts.append(bytes(reading.reads[0].prompt_ids[: reading.shared]).decode())
    assert texts == ["system: be strict\nuser: s\n\n", 'user: {"a":[1]}\n\n']


def test_the_engine_process_decides_alike(llm: LLM) -> None:
    async def both() -> list[list[TypedAnswer]]:
        async with AsyncLLM("preset:toy", max_num_seqs=8, max_model_len=4096) as engine:
            calls = [engine.decide(state, QUESTIONS) for state in ("s", {"t": 1})]
            return await asyncio.gather(*calls)

    found = asyncio.run(both())
    assert found == [llm.decide(state, QUESTIONS) for state in ("s", {"t": 1})]


def test_all_labels_of_an_alphabet_are_distinct() -> None:
    finder = LabelFinder(WordTokenizer(), "")
    for number, alphabet in product((2, 10), ("letters", "digits")):
        labels = finder.find(alphabet, number)  # type: ignore[arg-type]
        assert len(set(labels.ids)) == number
