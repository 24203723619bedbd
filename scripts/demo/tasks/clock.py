"""Times and dates."""

from datetime import date, timedelta
from random import Random

from demo.tasks.example import Conversation, Example
from demo.tasks.words import first_name, words

DAYS, MONTHS = words("days"), words("months")
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_LATER = (
    "It is {t}. What time is it in {d}?", "It is {t} now. What time will it be in {d}?", "What time is it {d} after {t}?",
    "A train leaves at {t} and needs {d}. When does it arrive?", "A film begins at {t} and lasts {d}. When does it end?",
    "The lesson starts at {t} and lasts {d}. When is it over?", "{n} leaves at {t} and walks {d}. When does the walk end?",
    "{n} begins to work at {t} and works {d}. At what time is the end?", "What is {t} plus {d}?",
)  # fmt: skip
_BETWEEN = ("How long is it from {a} to {b}?", "How many minutes are there from {a} to {b}?", "A lesson lasts from {a} to {b}. How many minutes is that?", "How many minutes pass between {a} and {b}?")  # fmt: skip
_WEEKDAY = ("Today is {a}. What day is it in {d}?", "If today is {a}, what day is it in {d}?", "What day is {d} after {a}?", "It is {a}. Which day of the week is it in {d}?")  # fmt: skip
_WEEKDAY_AGO = ("Today is {a}. What day was it {d} ago?", "If today is {a}, what day was it {d} ago?", "What day is {d} before {a}?")  # fmt: skip
_UNITS = {"minutes": ("hours", 60), "hours": ("days", 24), "days": ("weeks", 7), "seconds": ("minutes", 60), "months": ("years", 12)}  # fmt: skip
_NEXT_DATE = ("What date is the day after {a}?", "What is the day after {a}?", "Which date comes after {a}?", "Today is {a}. What date is tomorrow?", "It is {a}. What is the date tomorrow?")  # fmt: skip
_IN_DAYS = ("Today is {a}. What date is it in {d}?", "What date is {d} after {a}?", "It is {a}. Which date is it in {d}?")  # fmt: skip


def _count(number: int, unit: str) -> str:
    return f"{number} {unit if number != 1 else unit.removesuffix('s')}"


def later(random: Random) -> Conversation:
    """A time of the day some minutes or hours later."""
    hour, minute = random.randint(0, 20), random.choice((random.randint(0, 59), 5 * random.randint(0, 11)))
    hours, minutes = random.choice(((0, 5), (0, 1), (1, 5), (1, 0), (2, 5)))
    hours, minutes = hours and random.randint(1, 3), minutes and minutes * random.randint(1, 55 // minutes)
    shown = []
    total = minute + minutes
    if minutes:
        shown.append(f"{minute} + {minutes} = {total}.")
    if total >= 60:
        shown.append(f"{total} - 60 = {total - 60}.")
    carried = hours + total // 60
    if carried:
        shown.append(f"{hour} + {carried} = {hour + carried}.")
    lasts = " and ".join(_count(n, unit) for n, unit in ((hours, "hours"), (minutes, "minutes")) if n)
    text = random.choice(_LATER).format(t=f"{hour}:{minute:02}", d=lasts, n=first_name(random))
    end = (hour + carried) % 24
    if hour + carried >= 24:
        shown.append(f"{hour + carried} - 24 = {end}.")
    return (Example(text, " ".join([*shown, f"It is {end}:{total % 60:02}."])),)


def between(random: Random) -> Conversation:
    """The minutes between two times in the same hour."""
    hour, first = random.randint(0, 23), random.randint(0, 50)
    last = random.randint(first + 1, 59)
    text = random.choice(_BETWEEN).format(a=f"{hour}:{first:02}", b=f"{hour}:{last:02}")
    minutes = last - first
    return (Example(text, f"{last} - {first} = {minutes}. It is {_count(minutes, 'minutes')}."),)


def weekday(random: Random) -> Conversation:
    """A day of the week some days later or earlier, counted day by day."""
    start, days = random.randrange(7), random.randint(1, 7)
    sign = -1 if random.random() < 0.35 else 1
    counted = [DAYS[(start + sign * day) % 7] for day in range(1, days + 1)]
    text = random.choice(_WEEKDAY if sign > 0 else _WEEKDAY_AGO)
    verb = "is" if sign > 0 else "was"
    answer = f"{', '.join(counted)}. It {verb} {counted[-1]}."
    return (Example(text.format(a=DAYS[start], d=_count(days, "days")), answer),)


def neighbours(random: Random) -> Conversation:
    """The day or the month beside another one."""
    ring, kind = random.choice(((DAYS, "day"), (MONTHS, "month")))
    place = random.randrange(len(ring))
    sign, side = random.choice(((1, "after"), (-1, "before")))
    text = random.choice((f"What {kind} comes {side} {ring[place]}?", f"Which {kind} is {side} {ring[place]}?", f"Which {kind} comes {side} {ring[place]}?", f"What is the {kind} {side} {ring[place]}?"))  # fmt: skip
    return (Example(text, f"{ring[(place + sign) % len(ring)]} comes {side} {ring[place]}."),)


def month_lengths(random: Random) -> Conversation:
    """The number of days in a month, or its place in the year."""
    place = random.randrange(12)
    month = MONTHS[place]
    if random.random() < 0.5:
        text = random.choice(("How many days does {m} have?", "How many days are in {m}?", "How long is {m}?", "How many days has {m}?"))  # fmt: skip
        leap = " In a leap year it has 29." if month == "February" else ""
        return (Example(text.format(m=month), f"{month} has {_LENGTHS[place]} days.{leap}"),)
    text = random.choice(("Which month of the year is {m}?", "What number is the month {m}?", "What is the number of the month {m}?"))  # fmt: skip
    return (Example(text.format(m=month), f"{month} is month {place + 1}."),)


def units(random: Random) -> Conversation:
    """A time in a smaller unit."""
    small = random.choice(tuple(_UNITS))
    large, factor = _UNITS[small]
    count = random.randint(2, 5 if factor == 24 else 10)
    text = random.choice(("How many {s} are in {c}?", "How many {s} are {c}?", "How many {s} do {c} have?", "Convert {c} to {s}.", "What is {c} in {s}?"))  # fmt: skip
    result = count * factor
    answer = f"{count} x {factor} = {result}. {_count(count, large)} are {result} {small}."
    return (Example(text.format(s=small, c=_count(count, large)), answer, result),)


def next_date(random: Random) -> Conversation:
    """A date some days after another one."""
    start = date(2026, 1, 1) + timedelta(days=random.randrange(365))
    room = _LENGTHS[start.month - 1] - start.day
    if room >= 2 and random.random() < 0.6:
        days = random.randint(1, min(room, 20))
        text = random.choice(_IN_DAYS).format(a=_named(start), d=_count(days, "days"))
        shown = f"{start.day} + {days} = {start.day + days}. "
    else:
        days, shown = 1, ""
        if random.random() < 0.5:
            start = start.replace(day=_LENGTHS[start.month - 1])
        text = random.choice(_NEXT_DATE).format(a=_named(start))
    return (Example(text, f"{shown}It is {_named(start + timedelta(days=days))}."),)


def _named(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]}"
