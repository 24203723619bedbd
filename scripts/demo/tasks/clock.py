"""Times and dates."""

from datetime import date, timedelta
from random import Random

from demo.tasks.example import Conversation, Example
from demo.tasks.words import first_name, wording, words

DAYS = words("days")
MONTHS = words("months")
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_UNITS = {
    "minutes": ("hours", 60),
    "hours": ("days", 24),
    "days": ("weeks", 7),
    "seconds": ("minutes", 60),
    "months": ("years", 12),
}


def _count(number: int, unit: str) -> str:
    return f"{number} {unit if number != 1 else unit.removesuffix('s')}"


def later(random: Random) -> Conversation:
    """A time of the day some minutes or hours later."""
    hour = random.randint(0, 20)
    minute = random.choice((random.randint(0, 59), 5 * random.randint(0, 11)))
    hours, minutes = random.choice(((0, 5), (0, 1), (1, 5), (1, 0), (2, 5)))
    hours = hours and random.randint(1, 3)
    minutes = minutes and minutes * random.randint(1, 55 // minutes)
    shown = []
    total = minute + minutes
    if minutes:
        shown.append(f"{minute} + {minutes} = {total}.")
    if total >= 60:
        shown.append(f"{total} - 60 = {total - 60}.")
    carried = hours + total // 60
    if carried:
        shown.append(f"{hour} + {carried} = {hour + carried}.")
    lasts = " and ".join(
        _count(n, unit) for n, unit in ((hours, "hours"), (minutes, "minutes")) if n
    )
    text = wording(random, "later").format(t=f"{hour}:{minute:02}", d=lasts, n=first_name(random))
    end = (hour + carried) % 24
    if hour + carried >= 24:
        shown.append(f"{hour + carried} - 24 = {end}.")
    return (Example(text, " ".join([*shown, f"It is {end}:{total % 60:02}."])),)


def between(random: Random) -> Conversation:
    """The minutes between two times in the same hour."""
    hour = random.randint(0, 23)
    first = random.randint(0, 50)
    last = random.randint(first + 1, 59)
    text = wording(random, "between").format(a=f"{hour}:{first:02}", b=f"{hour}:{last:02}")
    minutes = last - first
    return (Example(text, f"{last} - {first} = {minutes}. It is {_count(minutes, 'minutes')}."),)


def weekday(random: Random) -> Conversation:
    """A day of the week some days later or earlier, counted day by day."""
    start = random.randrange(7)
    days = random.randint(1, 7)
    sign = -1 if random.random() < 0.35 else 1
    counted = [DAYS[(start + sign * day) % 7] for day in range(1, days + 1)]
    text = wording(random, "weekday after" if sign > 0 else "weekday before")
    verb = "is" if sign > 0 else "was"
    answer = f"{', '.join(counted)}. It {verb} {counted[-1]}."
    return (Example(text.format(a=DAYS[start], d=_count(days, "days")), answer),)


def neighbours(random: Random) -> Conversation:
    """The day or the month beside another one."""
    ring, kind = random.choice(((DAYS, "day"), (MONTHS, "month")))
    place = random.randrange(len(ring))
    sign, side = random.choice(((1, "after"), (-1, "before")))
    text = wording(random, "neighbours").format(k=kind, s=side, x=ring[place])
    return (Example(text, f"{ring[(place + sign) % len(ring)]} comes {side} {ring[place]}."),)


def month_lengths(random: Random) -> Conversation:
    """The number of days in a month, or its place in the year."""
    place = random.randrange(12)
    month = MONTHS[place]
    if random.random() < 0.5:
        text = wording(random, "lengths of months")
        leap = " In a leap year it has 29." if month == "February" else ""
        return (Example(text.format(m=month), f"{month} has {_LENGTHS[place]} days.{leap}"),)
    text = wording(random, "numbers of months")
    return (Example(text.format(m=month), f"{month} is month {place + 1}."),)


def units(random: Random) -> Conversation:
    """A time in a smaller unit."""
    small = random.choice(tuple(_UNITS))
    large, factor = _UNITS[small]
    count = random.randint(2, 5 if factor == 24 else 10)
    text = wording(random, "units")
    result = count * factor
    answer = f"{count} x {factor} = {result}. {_count(count, large)} are {result} {small}."
    return (Example(text.format(s=small, c=_count(count, large)), answer, result),)


def next_date(random: Random) -> Conversation:
    """A date some days after another one."""
    start = date(2026, 1, 1) + timedelta(days=random.randrange(365))
    room = _LENGTHS[start.month - 1] - start.day
    if room >= 2 and random.random() < 0.6:
        days = random.randint(1, min(room, 20))
        text = wording(random, "date in days").format(a=_named(start), d=_count(days, "days"))
        shown = f"{start.day} + {days} = {start.day + days}. "
    else:
        days, shown = 1, ""
        if random.random() < 0.5:
            start = start.replace(day=_LENGTHS[start.month - 1])
        text = wording(random, "next date").format(a=_named(start))
    return (Example(text, f"{shown}It is {_named(start + timedelta(days=days))}."),)


def _named(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]}"
