"""Schedulers, orders and predictors made of the classes that settings name."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from orca_jax.policy.errors import PASSED_ON
from orca_jax.policy.ordered import Ordered
from orca_jax.policy.predictor import PolicyPredictor
from orca_jax.policy.protocol import API, Policy
from orca_jax.policy.retention import PolicyRetention
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.sched.prefixes.spans import EngineRetention
from orca_jax.sched.scheduler import SchedulerSettings
from orca_jax.values.checks import first_line, is_class_name, json_value, load_class, short
from orca_jax.values.config import LRU, RETENTIONS, Traits
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import URGENCY_FIELDS

OUTSIDE = ("scheduler", "scheduling_policy", "length_predictor", "retention")
"""The settings that may name a class from outside."""
FIELDS = (*URGENCY_FIELDS, "predicted")
"""The fields of `RequestView` that callers and predictors fill."""


def label_of(name: str | None, setting: str) -> str | None:
    """Return a name for timelines: of a class from outside without its path, with the digest of its file."""
    if name is None or not is_class_name(name):
        return name
    kind = load_class(name, setting)
    file = getattr(sys.modules[kind.__module__], "__file__", None)  # a notebook has none
    digest = sha256(Path(file).read_bytes()).hexdigest() if file else "unknown"
    return f"{kind.__qualname__} (sha256:{digest})"


@dataclass(frozen=True)
class PolicyKind:
    """A kind of scheduler whose decisions are those of a class from outside."""

    kind: type[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_order: bool = False

    @property
    def traits(self) -> Traits:
        """Those of the scheduler, with the fields that the class may read; an order comes with an ordering."""
        reads = self.needs
        if not hasattr(self.kind, "reads"):  # an order that says nothing
            reads = frozenset(FIELDS)
        return PolicyScheduler.traits._replace(has_orderings=self.is_order, reads=reads)

    @property
    def needs(self) -> frozenset[str]:
        """The fields that the class says it reads."""
        return frozenset(getattr(self.kind, "reads", ()))

    @property
    def name(self) -> str:
        """The name of the class, for errors and timelines; it has no path."""
        return self.kind.__qualname__

    def from_settings(self, settings: SchedulerSettings) -> PolicyScheduler:
        """Make a scheduler with a new policy.

        Raises:
            ConfigError: the class does not take the options.
        """
        if self.is_order:
            policy: Policy = Ordered(made(self.kind, "scheduling_policy"), settings.watermark)
        else:
            policy = made(self.kind, "scheduler", self.options)
        return PolicyScheduler(
            policy,
            self.name,
            max_bs=settings.max_bs,
            token_budget=settings.token_budget,
            num_rows=settings.num_rows or settings.max_bs * settings.num_stages,
            n_workers=settings.num_stages + settings.num_ahead,
            num_stages=settings.num_stages,
            seconds=settings.seconds,
            clock=settings.clock,
        )


def policy_kind(name: str, options: str | None) -> PolicyKind:
    """Return the kind of scheduler of a class.

    Args:
        name: MODULE:CLASS or FILE.py:CLASS.
        options: keyword arguments of the class, as JSON of an object.

    Raises:
        ConfigError: there is no such class, it has another API or lacks a method, or the options are not an object.
    """
    kind = checked_class(name, "scheduler", ("decide", "started", "ended"), ("reads", "may_starve"))
    _check_reads(kind, "scheduler")
    try:
        values = json_value(options or "{}")
    except ValueError as error:
        raise ConfigError(
            f"scheduler_options is not JSON: {error}", param="scheduler_options"
        ) from None
    if not isinstance(values, dict):
        message = (
            f'scheduler_options must be an object such as {{"quantum": 16}}, got {short(options)}'
        )
        raise ConfigError(message, param="scheduler_options")
    return PolicyKind(kind, values)


def order_kind(name: str) -> PolicyKind:
    """Return the kind of scheduler with the order of a class. Raises ConfigError as `policy_kind` does."""
    kind = checked_class(name, "scheduling_policy", ("key",), ("preempts", "is_static"))
    _check_reads(kind, "scheduling_policy")
    return PolicyKind(kind, is_order=True)


def predictor_kind(name: str) -> PolicyPredictor:
    """Return the length predictor of a class. Raises ConfigError as `policy_kind` does."""
    kind = checked_class(name, "length_predictor", ("predict", "observe"), ("refresh",))
    return PolicyPredictor(made(kind, "length_predictor"), kind.__qualname__)


def retention_kind(name: str) -> type[Any]:
    """Return the class of a retention from outside. Raises ConfigError as `policy_kind` does."""
    kind = checked_class(name, "retention", ("keep",), ())
    _check_reads(kind, "retention")
    return kind


def reads_of_retention(name: str) -> frozenset[str]:
    """Return the fields of callers that a retention reads. Raises ConfigError as `retention_kind` does."""
    if not is_class_name(name):
        return frozenset()
    return frozenset(getattr(retention_kind(name), "reads", ()))


def made_retention(name: str) -> EngineRetention | None:
    """Return the retention of a setting; None for the least recently used pages first.

    Raises:
        ConfigError: there is no such class, or it cannot be made.
    """
    if name == LRU:
        return None
    if is_class_name(name):
        kind = retention_kind(name)
        return PolicyRetention(made(kind, "retention"), kind.__qualname__)
    own: EngineRetention = load_class(RETENTIONS[name].place, "retention")()
    return own


def _check_reads(kind: type[Any], setting: str) -> None:
    """Refuse a class that reads a field which nothing fills. Raises ConfigError."""
    reads = getattr(kind, "reads", ())
    if isinstance(reads, str) or not isinstance(reads, Iterable):
        message = f"{setting}: {kind.__qualname__}.reads must be a set of names, got {short(reads)}"
        raise ConfigError(message, param=setting)
    unknown = sorted({str(name) for name in reads}.difference(FIELDS))
    if unknown:
        message = (
            f"{setting}: {kind.__qualname__} reads {', '.join(unknown)}, which nothing fills; "
            f"callers and predictors give {', '.join(FIELDS)}"
        )
        raise ConfigError(message, param=setting)


def checked_class(
    name: str, setting: str, methods: tuple[str, ...], values: tuple[str, ...]
) -> type[Any]:
    """Return a class from outside that has these methods and class variables, for this version of the protocols.

    Raises:
        ConfigError: it has not.
    """
    kind = load_class(name, setting)
    missing = [each for each in ("api", *values, *methods) if not hasattr(kind, each)]
    if missing:
        raise ConfigError(
            f"{setting}: {kind.__qualname__} lacks {', '.join(missing)}", param=setting
        )
    if kind.api != API:
        message = f"{setting}: {kind.__qualname__} is written for version {kind.api} of orca_jax.policy, this is {API}"
        raise ConfigError(message, param=setting)
    return kind


def made(kind: type[Any], setting: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return an instance of a class from outside.

    Raises:
        ConfigError: its constructor raises an exception.
    """
    try:
        return kind(**(options or {}))
    except PASSED_ON:
        raise
    except BaseException as error:
        param = "scheduler_options" if options else setting
        raise ConfigError(
            f"{param}: {kind.__qualname__} cannot be made: {first_line(error)}", param=param
        ) from error
