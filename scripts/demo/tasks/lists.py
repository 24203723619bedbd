"""Counting and sorting."""

from random import Random

from demo.tasks.example import Conversation, Example
from demo.tasks.words import some, words

_UP = ("Sort {q}.", "Sort these numbers: {q}", "Put in order: {q}", "Sort the numbers {q}.", "Sort {q} from small to large.", "Please sort {q}.", "Sort ascending: {q}", "Bring into order: {q}.")  # fmt: skip
_DOWN = ("Sort {q} from large to small.", "Sort descending: {q}", "Sort the numbers {q} in descending order.", "Put in descending order: {q}", "Sort {q}, the largest first.")  # fmt: skip
_BY_NAME = ("Sort these words: {q}", "Sort the words {q}.", "Put in alphabetical order: {q}", "Sort {q} alphabetically.", "Sort by the alphabet: {q}", "Order the words {q} by the alphabet.")  # fmt: skip
_LARGEST = ("Which is the largest of {q}?", "What is the largest number: {q}?", "Find the largest number in {q}.", "Which number is the greatest: {q}?", "What is the maximum of {q}?")  # fmt: skip
_SMALLEST = ("Which is the smallest of {q}?", "What is the smallest number: {q}?", "Find the smallest number in {q}.", "Which number is the least: {q}?", "What is the minimum of {q}?")  # fmt: skip
_ITEMS = ("How many words are in this list: {q}?", "Count the words: {q}", "How many items are there: {q}?", "Count: {q}", "How many things are listed here: {q}?")  # fmt: skip
_OF_ONE = ('How many times does "{w}" appear in {q}?', 'Count "{w}" in: {q}', "How often is {w} in the list {q}?", "How many times is {w} in {q}?")  # fmt: skip


def sort_numbers(random: Random) -> Conversation:
    """Numbers to sort."""
    numbers = random.sample(range(1, 100), random.randint(3, 6))
    is_down = random.random() < 0.35
    text = random.choice(_DOWN if is_down else _UP).format(q=", ".join(map(str, numbers)))
    return (Example(text, ", ".join(map(str, sorted(numbers, reverse=is_down)))),)


def sort_words(random: Random) -> Conversation:
    """Words to sort; their first letters differ."""
    by_letter = {word[0]: word for word in random.sample(words("plain"), len(words("plain")))}
    chosen = random.sample(sorted(by_letter.values()), random.randint(3, 5))
    text = random.choice(_BY_NAME).format(q=", ".join(chosen))
    return (Example(text, ", ".join(sorted(chosen))),)


def extreme(random: Random) -> Conversation:
    """The largest or the smallest of some numbers."""
    numbers = random.sample(range(1, 100), random.randint(2, 5))
    is_largest = random.random() < 0.5
    result = max(numbers) if is_largest else min(numbers)
    text = random.choice(_LARGEST if is_largest else _SMALLEST).format(q=", ".join(map(str, numbers)))
    return (Example(text, f"The {'largest' if is_largest else 'smallest'} number is {result}.", result),)


def count_to(random: Random) -> Conversation:
    """Numbers in steps, up or down."""
    step = random.choice((1, 1, 1, 2, 5, 10))
    first = random.choice((1, 1, random.randint(2, 40))) if step == 1 else step * random.randint(1, 4)
    last = first + step * random.randint(3, 10)
    numbers = list(range(first, last + 1, step))
    by = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
    text = random.choice(("Count{by} from {a} to {b}.", "Please count{by} from {a} to {b}.", "Count from {a} to {b}{by}."))  # fmt: skip
    if random.random() < 0.3:
        numbers, first, last = numbers[::-1], last, first
        text = random.choice(("Count down{by} from {a} to {b}.", "Count backwards{by} from {a} to {b}."))
    return (Example(text.format(by=by, a=first, b=last), ", ".join(map(str, numbers))),)


def count_items(random: Random) -> Conversation:
    """The length of a list, counted item by item."""
    title = random.choice(("plain", "animals", "colours", "things"))
    chosen = some(random, title, random.randint(2, 8))
    counted = ", ".join(f"{number} {word}" for number, word in enumerate(chosen, 1))
    text = random.choice(_ITEMS).format(q=", ".join(chosen))
    return (Example(text, f"{counted}. That makes {len(chosen)}.", len(chosen)),)


def count_one(random: Random) -> Conversation:
    """The number of times that a word is in a list."""
    wanted, *others = some(random, random.choice(("plain", "animals", "colours")), 4)
    chosen = [wanted] * random.randint(1, 5) + random.choices(others, k=random.randint(1, 4))
    random.shuffle(chosen)
    count = chosen.count(wanted)
    shown = ", ".join(f"{wanted} {number}" for number in range(1, count + 1))
    text = random.choice(_OF_ONE).format(w=wanted, q=", ".join(chosen))
    return (Example(text, f"{shown}. It appears {count} {'time' if count == 1 else 'times'}.", count),)
