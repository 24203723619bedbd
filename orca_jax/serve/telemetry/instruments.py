"""Counters, gauges and histograms of `/metrics`.

`prometheus_client` renders the text. Counting is done here: the library's counters take a lock in every call and
publish an additional `_created` series each.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

PREFIX = "orca_jax_"
Labels = tuple[str, ...]


class Instrument(ABC):
    """A metric with samples to publish.

    Args:
        name: name without the prefix.
        text: the line of help.
        labels: names of its labels.
        prefix: prefix of the name.
    """

    def __init__(self, name: str, text: str, labels: Labels = (), *, prefix: str = PREFIX) -> None:
        self.name = name
        self._prefix = prefix
        self._text = text
        self._labels = labels

    def family(self) -> Metric:
        """The current samples."""
        return self._family(self._prefix + self.name, self._text, self._labels, ())

    def twin(self, name: str, labels: Mapping[str, str]) -> Metric:
        """The current samples under another name, each with more labels."""
        text = f"The same as {self._prefix}{self.name}."
        return self._family(name, text, (*labels, *self._labels), tuple(labels.values()))

    @abstractmethod
    def _family(self, name: str, text: str, labels: Labels, first: Labels) -> Metric:
        """Return the samples; `first` are the values of the labels before the metric's own."""


class Counter(Instrument):
    """A total that only grows, one for each combination of label values in use."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels = (),
        known: Sequence[Labels] = (),
        *,
        prefix: str = PREFIX,
    ) -> None:
        super().__init__(name, text, labels, prefix=prefix)
        self._values: dict[Labels, float] = dict.fromkeys(known if labels else [()], 0)

    def increase(self, amount: float = 1, labels: Labels = ()) -> None:
        """Add to the total; `labels` in the order of their names."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def _family(self, name: str, text: str, labels: Labels, first: Labels) -> Metric:
        family = CounterMetricFamily(name, text, labels=labels)
        for own, value in self._values.items():
            family.add_metric((*first, *own), value)
        return family


class Gauge(Instrument):
    """A current value, one for each combination of label values in use."""

    def __init__(self, name: str, text: str, labels: Labels = (), *, prefix: str = PREFIX) -> None:
        super().__init__(name, text, labels, prefix=prefix)
        self._values: dict[Labels, float] = {} if labels else {(): 0}

    def set(self, value: float, labels: Labels = ()) -> None:
        """Replace the value; `labels` in the order of their names."""
        self._values[labels] = value

    def has(self, labels: Labels) -> bool:
        """True if there is a value for these labels."""
        return labels in self._values

    def clear(self) -> None:
        """Remove the values of all labels."""
        self._values.clear()

    def _family(self, name: str, text: str, labels: Labels, first: Labels) -> Metric:
        family = GaugeMetricFamily(name, text, labels=labels)
        for own, value in self._values.items():
            family.add_metric((*first, *own), value)
        return family


class Distribution:
    """Counts of values between bounds. `observe` runs for every generated token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_counts(self, counts: Sequence[float], total: float) -> None:
        """Add values that were counted elsewhere, between the same bounds. `total` is their sum."""
        for place, count in enumerate(counts):
            self._counts[place] += int(count)
        self._sum += total

    def add_to(self, family: HistogramMetricFamily, labels: Labels) -> None:
        """Publish the counts, cumulative as in Prometheus."""
        below, buckets = 0, []
        for bound, count in zip(
            [*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True
        ):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric(labels, buckets, self._sum)


class Histogram(Instrument):
    """Distributions, one for each combination of label values in use."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        super().__init__(name, text, labels)
        self._bounds = bounds
        self._children: dict[Labels, Distribution] = {} if labels else {(): Distribution(bounds)}

    def of(self, labels: Labels = ()) -> Distribution:
        """The distribution of these label values."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = Distribution(self._bounds)
        return child

    def _family(self, name: str, text: str, labels: Labels, first: Labels) -> Metric:
        family = HistogramMetricFamily(name, text, labels=labels)
        for own, child in self._children.items():
            child.add_to(family, (*first, *own))
        return family
