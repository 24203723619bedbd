"""Small stories, for completions and for conversations."""

from random import Random

from demo.tasks.example import Conversation, Example
from demo.tasks.words import first_name, some, with_articles, words
from demo.tasks.words import sections as read


def story(random: Random, opening: str = "") -> tuple[str, str]:
    """A story, and a request for it. `opening` names the list of its first sentence."""
    parts = read("stories.txt")
    main, other = some(random, "animals", 2)
    places = {"n": first_name(random), "a": main, "b": other, "k": random.choice(words("colours"))}
    places |= {"t": random.choice(words("things")), "f": random.choice(words("foods"))}
    order = [opening or "opening", "home", "event", "turn", "ending"]
    if random.random() < 0.5:
        order.insert(4, "turn")
    sentences = list(dict.fromkeys(random.choice(parts[title]) for title in order))
    told = " ".join(sentences)
    asked = random.choice(parts["asked"])
    return with_articles(told.format(**places)), with_articles(asked.format(**places))


def text(random: Random) -> str:
    """A story alone."""
    return story(random, "sea" if random.random() < 0.4 else "")[0]


def tell(random: Random) -> Conversation:
    """A request for a story, and the story."""
    told, asked = story(random)
    return (Example(asked, told),)
