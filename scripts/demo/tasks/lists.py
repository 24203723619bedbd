"""Counting and sorting."""

from random import Random

from demo.tasks.example import Conversation, Example
from demo.tasks.words import some, wording, words


def sort_numbers(random: Random) -> Conversation:
    """Numbers to sort."""
    numbers = random.sample(range(1, 100), random.randint(3, 6))
    is_down = random.random() < 0.35
    text = wording(random, "descending" if is_down else "ascending").format(
        q=", ".join(map(str, numbers))
    )
    return (Example(text, ", ".join(map(str, sorted(numbers, reverse=is_down)))),)


def sort_words(random: Random) -> Conversation:
    """Words to sort; their first letters differ."""
    by_letter = {word[0]: word for word in random.sample(words("plain"), len(words("plain")))}
    chosen = random.sample(sorted(by_letter.values()), random.randint(3, 5))
    text = wording(random, "alphabetical").format(q=", ".join(chosen))
    return (Example(text, ", ".join(sorted(chosen))),)


def extreme(random: Random) -> Conversation:
    """The largest or the smallest of some numbers."""
    numbers = random.sample(range(1, 100), random.randint(2, 5))
    is_largest = random.random() < 0.5
    result = max(numbers) if is_largest else min(numbers)
    text = wording(random, "largest" if is_largest else "smallest").format(
        q=", ".join(map(str, numbers))
    )
    return (
        Example(text, f"The {'largest' if is_largest else 'smallest'} number is {result}.", result),
    )


def count_to(random: Random) -> Conversation:
    """Numbers in steps, up or down."""
    step = random.choice((1, 1, 1, 2, 5, 10))
    first = (
        random.choice((1, 1, random.randint(2, 40))) if step == 1 else step * random.randint(1, 4)
    )
    last = first + step * random.randint(3, 10)
    numbers = list(range(first, last + 1, step))
    by = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
    text = wording(random, "counting up")
    if random.random() < 0.3:
        numbers, first, last = numbers[::-1], last, first
        text = wording(random, "counting down")
    return (Example(text.format(by=by, a=first, b=last), ", ".join(map(str, numbers))),)


def count_items(random: Random) -> Conversation:
    """The length of a list, counted item by item."""
    title = random.choice(("plain", "animals", "colours", "things"))
    chosen = some(random, title, random.randint(2, 8))
    counted = ", ".join(f"{number} {word}" for number, word in enumerate(chosen, 1))
    text = wording(random, "items").format(q=", ".join(chosen))
    return (Example(text, f"{counted}. That makes {len(chosen)}.", len(chosen)),)


def count_one(random: Random) -> Conversation:
    """The number of times that a word is in a list."""
    wanted, *others = some(random, random.choice(("plain", "animals", "colours")), 4)
    chosen = [wanted] * random.randint(1, 5) + random.choices(others, k=random.randint(1, 4))
    random.shuffle(chosen)
    count = chosen.count(wanted)
    shown = ", ".join(f"{wanted} {number}" for number in range(1, count + 1))
    text = wording(random, "one item").format(w=wanted, q=", ".join(chosen))
    return (
        Example(text, f"{shown}. It appears {count} {'time' if count == 1 else 'times'}.", count),
    )
