"""Tables of measured times: read from CSV files, and looked up between their points."""

import csv
import gzip
import math
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError

MOST_LINES = 200_000
MOST_BYTES = 32 * 2**20  # of a table, unpacked


class MeasuredTime(NamedTuple):
    """A line of a table: its name, "" without one, its numbers and its time in seconds."""

    name: str
    key: tuple[int, ...]
    seconds: float


def read_values(parts: Sequence[str], kinds: Mapping[str, type], usage: str) -> dict[str, Any]:
    """The values of parts such as "tensor=2", whose numbers must not be negative.

    Args:
        parts: those of a flag.
        kinds: the types of the values, by the names that parts may have.
        usage: the form of the flag, for errors.

    Raises:
        ConfigError: a part is wrong; `param` is "cost".
    """
    values: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        try:
            values[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise ConfigError(f"cost must be {usage}, got {short(part)}", param="cost") from None
        if kinds[name] is not str and not 0 <= values[name] < 1e15:
            raise ConfigError(f"{name} must be at least 0, got {short(value)}", param="cost")
    return values


def table_file(path: str | Path) -> Path:
    """The file of a table, compressed or plain. `path` is its path without an ending."""
    packed = Path(f"{path}.csv.gz")
    return packed if packed.exists() else Path(f"{path}.csv")


def read_rows(
    path: Path, columns: Sequence[str], texts: Sequence[str] = ()
) -> Iterator[MeasuredTime]:
    """Yield the lines of a table whose times are microseconds, in a column `time_us` or `us`.

    Args:
        path: a CSV file, also compressed by gzip.
        columns: names of the columns of numbers.
        texts: names of the columns of texts before them, which name a line together.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; `param` is "cost".
    """
    names = [*texts, *columns]
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for number, cells in enumerate(_lines(path), start=1):
        if number == 1:
            if cells not in ([*names, "time_us"], [*names, "us"]):
                wanted = ",".join([*names, "time_us"])
                raise _wrong(path, 1, f"must be {wanted}, got {short(','.join(cells))}")
            continue
        if len(cells) != len(names) + 1:
            raise _wrong(path, number, f"must have {len(names) + 1} values, got {len(cells)}")
        name = " ".join(cells[: len(texts)])
        *key, time = cells[len(texts) :]
        row = MeasuredTime(name, _counts(path, number, key), _seconds(path, number, time))
        if row[:2] in seen:
            raise _wrong(path, number, "repeats the numbers of an earlier line")
        seen.add(row[:2])
        yield row


def _lines(path: Path) -> Iterator[list[str]]:
    """The lines of a file, at most `MOST_LINES`."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if is_packed:
                data = gzip.GzipFile(fileobj=file).read(MOST_BYTES + 1)
            else:
                data = file.read(MOST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="cost") from None
    lines = text.splitlines()
    if len(data) > MOST_BYTES or len(lines) > MOST_LINES:
        raise _wrong(path, MOST_LINES + 1, f"and longer tables are not read: {MOST_LINES} lines")
    if len(lines) < 2:
        raise _wrong(path, 1, "must be a heading line, with times below it")
    try:
        yield from csv.reader(lines, strict=True)
    except csv.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="cost") from None


def _counts(path: Path, line: int, cells: Sequence[str]) -> tuple[int, ...]:
    if not all(cell.isascii() and cell.isdigit() and len(cell) < 11 for cell in cells):
        raise _wrong(path, line, f"must have whole numbers below 10^10, got {short(cells)}")
    return tuple(map(int, cells))


def _seconds(path: Path, line: int, cell: str) -> float:
    try:
        time = float(cell)
    except ValueError:
        time = math.nan
    if not 0 < time < 1e9:
        raise _wrong(path, line, f"must end with microseconds above 0, got {short(cell)}")
    return time / 1e6


def _wrong(path: Path, line: int, problem: str) -> ConfigError:
    return ConfigError(f"{path}: line {line} {problem}", param="cost")


class Curve:
    """Seconds by one number: linear between the points, and beyond the last one in proportion.

    Args:
        points: the seconds by number, at least one.
        is_outside: all looked up numbers count as outside, as those of a line between other ones.

    Attributes:
        num_outside: numbers below the first point, whose seconds they got, or beyond the last one.
    """

    def __init__(self, points: Mapping[int, float], *, is_outside: bool = False) -> None:
        self._numbers = sorted(points)
        self._seconds = [points[number] for number in self._numbers]
        self._is_outside = is_outside
        self.num_outside = 0

    def at(self, number: float) -> float:
        """The seconds; those of the first point below it."""
        numbers = self._numbers
        seconds = self._seconds
        self.num_outside += self._is_outside or not numbers[0] <= number <= numbers[-1]
        if number >= numbers[-1]:
            return seconds[-1] * number / numbers[-1]
        (low, share), (high, other) = neighbours(numbers, number)
        return share * seconds[low] + other * seconds[high]


def stepped(points: Mapping[int, float], tile: int) -> dict[int, float]:
    """The seconds of a curve in steps up to the next point, or to the next multiple of `tile`."""
    curve = Curve(points)
    ends = sorted({*points, *range(tile, max(points), tile)})
    found = {}
    for low, high in pairwise([0, *ends]):
        found[low + 1] = curve.at(high)
        found[high] = curve.at(high)
    return found


def power_between(number: float, low: tuple[int, float], high: tuple[int, float]) -> float:
    """The seconds at a number between two points, by the power of the number that goes through both."""
    if number <= low[0] or low[0] == high[0]:
        return low[1]
    rise = math.log(number / low[0]) / math.log(high[0] / low[0])
    return float(low[1] * (high[1] / low[1]) ** rise)


class Grid:
    """Seconds by several numbers, linear in each of them. A grid may lack points, whose neighbours then count more.

    Args:
        points: the seconds, by as many numbers each.
    """

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        self._points = points
        size = len(next(iter(points)))
        self._axes = [sorted({key[axis] for key in points}) for axis in range(size)]
        self.num_outside = 0

    def at(self, key: Sequence[float]) -> float:
        """The seconds. Beyond an axis its end counts, and `num_outside` grows."""
        pairs = []
        for axis, number in zip(self._axes, key, strict=True):
            self.num_outside += number > axis[-1]
            pairs.append([(axis[place], share) for place, share in neighbours(axis, number)])
        total = 0.0
        weight = 0.0
        for corner in product(*pairs):
            share = math.prod([each for _, each in corner])
            seconds = self._points.get(tuple(number for number, _ in corner))
            if share and seconds is not None:
                total += share * seconds
                weight += share
        if not weight:
            self.num_outside += 1
            return self._nearest(key)
        return total / weight

    def holds(self, key: Sequence[float]) -> bool:
        """Return True if no number is beyond its axis."""
        return all([number <= axis[-1] for axis, number in zip(self._axes, key, strict=True)])

    def grown(self, key: Sequence[float]) -> float:
        """The seconds. Beyond an axis they grow in proportion, and `num_outside` grows."""
        growth = math.prod(
            [max(1.0, number / axis[-1]) for axis, number in zip(self._axes, key, strict=True)]
        )
        return growth * self.at(key)

    def _nearest(self, key: Sequence[float]) -> float:
        """The seconds of the point with the least sum of distances, each as a share of its axis."""
        ends = [axis[-1] or 1 for axis in self._axes]

        def distance(point: tuple[int, ...]) -> float:
            return sum(
                abs(number - own) / end for number, own, end in zip(key, point, ends, strict=True)
            )

        return self._points[min(self._points, key=distance)]


def neighbours(
    numbers: Sequence[int], number: float
) -> tuple[tuple[int, float], tuple[int, float]]:
    """The places below and above a number in an ascending list, each with its share; both are the end beyond it."""
    high = min(bisect_left(numbers, number), len(numbers) - 1)
    low = max(high - 1, 0)
    if number >= numbers[high] or low == high:
        return (high, 1.0), (high, 0.0)
    share = (numbers[high] - number) / (numbers[high] - numbers[low])
    return (low, share), (high, 1 - share)
