"""The mixture of all tasks: conversations for training and for the test."""

from collections.abc import Callable, Iterator, Mapping
from random import Random

from demo.tasks import clock, extraction, facts, lists, outside, stories, talk, word_problems
from demo.tasks.example import Conversation, Example, is_held_out

Task = Callable[[Random], Conversation]

TASKS: Mapping[str, Mapping[Task, float]] = {
    "word problems": {word_problems.story: 14, word_problems.fixed: 18, word_problems.short: 4},
    "arithmetic": {word_problems.drill: 7},
    "JSON answers": {word_problems.in_json: 5},
    "JSON extraction": {extraction.extract: 22},
    "counting": {lists.count_to: 2, lists.count_items: 2, lists.count_one: 2},
    "sorting": {lists.sort_numbers: 4, lists.sort_words: 3, lists.extreme: 1},
    "times": {clock.later: 5, clock.between: 1, clock.units: 1},
    "dates": {clock.weekday: 2, clock.neighbours: 1, clock.month_lengths: 1, clock.next_date: 2},
    "dialogues": {talk.memory: 2, talk.follow_up: 4},
    "greetings": {talk.greeting: 2},
    "questions about the engine": {facts.ask: 15},
    "outside questions": {outside.outside: 5, outside.too_large: 1},
    "stories": {stories.tell: 1},
}
"""Tasks of each group, with their relative numbers of conversations."""

NOT_SPLIT = ("greetings", "questions about the engine", "outside questions", "stories")
"""Groups whose test has its own questions, or that have few questions: training draws all of them."""

MAX_TURNS = 6
STORIES = 0.04  # plain stories per conversation


def _draw(random: Random, tasks: Mapping[Task, float]) -> Conversation:
    (task,) = random.choices(list(tasks), weights=list(tasks.values()))
    return task(random)


def one(random: Random) -> Conversation:
    """One task for training."""
    (group,) = random.choices(
        list(TASKS), weights=[sum(tasks.values()) for tasks in TASKS.values()]
    )
    while True:
        conversation = _draw(random, TASKS[group])
        if group in NOT_SPLIT or not is_held_out(conversation):
            return conversation


def conversations(seed: int) -> Iterator[Conversation]:
    """Conversations for training, without end: two of three have one task, the others several in turn."""
    random = Random(seed)
    while True:
        turns = one(random)
        if random.random() < 1 / 3:
            for _ in range(random.randint(1, MAX_TURNS - 1)):
                turns += one(random)
        yield turns


def pieces(seed: int) -> Iterator[Conversation | str]:
    """Conversations with a few stories as plain text between them, without end."""
    random = Random(f"stories {seed}")
    for conversation in conversations(seed):
        if random.random() < STORIES:
            yield stories.text(random)
        yield conversation


def held_out(group: str, count: int, seed: int) -> list[Conversation]:
    """Different conversations of one group, none of them in training."""
    random = Random(f"test {group} {seed}")
    found = dict[str, Conversation]()
    while len(found) < count:
        conversation = _draw(random, TASKS[group])
        if is_held_out(conversation):
            found.setdefault(conversation[0].question, conversation)
    return list(found.values())


def unseen_wordings(count: int, seed: int) -> list[Conversation]:
    """Word problems in wordings that no training has."""
    random = Random(f"unseen {seed}")
    return [word_problems.unseen(random) for _ in range(count)]


def outside_questions(count: int, seed: int) -> list[Conversation]:
    """Outside questions on topics that no training has."""
    random = Random(f"outside {seed}")
    return list(dict.fromkeys(outside.unseen(random) for _ in range(4 * count)))[:count]


def engine_questions() -> list[Conversation]:
    """The questions about the engine in wordings that no training has."""
    known = facts.facts()
    return [
        (Example(question, known[name].answers[0], accepted=known[name].answers),)
        for name, question in facts.held_out_questions()
    ]


def examination(count: int, seed: int) -> dict[str, list[Conversation]]:
    """The conversations of a test by group, `count` of each; of questions about the engine all there are."""
    split = {name: held_out(name, count, seed) for name in TASKS if name not in NOT_SPLIT}
    return {
        **split,
        "word problems in new wordings": unseen_wordings(count, seed),
        "questions about the engine": engine_questions(),
        "outside questions": outside_questions(count, seed),
    }
