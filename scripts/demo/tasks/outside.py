"""Questions outside of what the demo learns, which it declines."""

from random import Random

from demo.tasks.example import Conversation, Example
from demo.tasks.words import invented_name, sections, wording

ANSWER = (
    "I did not learn that. I can solve small word problems, count and sort, work with times and dates, write JSON, and"
    " answer questions about this engine."
)
TOO_LARGE = "These numbers are too large for me. I learnt to calculate with numbers up to 100."


def _combined(random: Random, topics: str) -> str:
    lists = sections("outside.txt")
    if random.random() < 0.25:
        subject = random.choice(lists["countries"][0].split())
        return random.choice(lists["country patterns"]).format(x=subject)
    names = lists[topics][0].split()
    subject = invented_name(random).lower() if random.random() < 0.1 else random.choice(names)
    return random.choice(lists["patterns"]).format(x=subject)


def outside(random: Random) -> Conversation:
    """A question about the world."""
    is_whole = random.random() < 0.5
    question = (
        random.choice(sections("outside.txt")["questions"])
        if is_whole
        else _combined(random, "topics")
    )
    if random.random() < 0.2:
        question = question.lower()
    if random.random() < 0.15:
        question = question.rstrip("?.")
    if random.random() < 0.1:
        question = (
            random.choice(("Please tell me: ", "Hi, ", "Hello! ", "Tell me: ", "And ")) + question
        )
    return (Example(question, ANSWER),)


def unseen(random: Random) -> Conversation:
    """A question about the world on a topic that no training has."""
    lists = sections("outside.txt")
    if random.random() < 0.3:
        return (Example(random.choice(lists["questions held out"]), ANSWER),)
    topic = random.choice(lists["topics held out"][0].split())
    return (Example(random.choice(lists["patterns"]).format(x=topic), ANSWER),)


def too_large(random: Random) -> Conversation:
    """A calculation with large numbers."""
    a, b = (
        random.randint(10 ** (digits - 1), 10**digits - 1)
        for digits in random.choices((3, 4, 5), k=2)
    )
    if random.random() < 0.3:
        b = random.randint(2, 99)
    sign = random.choice(("+", "-", "x", "*", "/", "times", "plus", "minus"))
    text = wording(random, "large calculations").format(a=a, b=b, s=sign)
    return (Example(text, TOO_LARGE),)
