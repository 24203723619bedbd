"""Classes in settings, and the table of retentions."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Named:
    """A class that a setting names, and its words in the help of the setting."""

    place: str  # MODULE:CLASS; it is imported at its first use
    words: str


LRU = "lru"
RETENTIONS: Mapping[str, Named] = {
    LRU: Named("", "lru: the least recently used first"),
    "lru-ttl": Named(
        "orca_jax.sched.prefixes.retentions:LruTtl",
        "lru-ttl: the same, and wishes of calls for a time to live are heard",
    ),
    "cost": Named(
        "orca_jax.sched.prefixes.retentions:Cost",
        "cost: the cheapest to compute again first, by the chance that it is used",
    ),
}
"""The values of `EngineConfig.retention`, beside a class of a caller. The first one is that of the pools themselves."""
