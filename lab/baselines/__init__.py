"""Systems on the paper's simulated devices, each by its name.

`lab/policies` has those whose scheduler is a policy for `--scheduler`. The schedulers in this folder are beyond that
protocol: `cells` has to know which requests are in flight, `ft` and `padded` let ended requests keep their places.
"""

import sys
from collections.abc import Mapping

from lab.baselines import cells, faster_transformer, padded
from lab.baselines.policy import Policy, Setting
from lab.policies.pools import Pools
from lab.policies.prefill_first import PrefillFirst
from orca_jax.policy import Policy as OutsidePolicy
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.values.cache_spec import ceil_div

__all__ = ["POLICIES", "Policy", "Setting"]


def _chunked(setting: Setting) -> ChunkedScheduler:
    return ChunkedScheduler(
        setting.max_bs,
        setting.token_budget,
        FirstComeFirstServed(),
        n_workers=setting.in_flight,
        num_stages=min(setting.num_stages, setting.in_flight),
    )


def _outside(policy: OutsidePolicy, setting: Setting) -> PolicyScheduler:
    """A policy without a bound on tokens. It takes no request that is in flight, so the stages need no shares."""
    return PolicyScheduler(
        policy,
        max_bs=setting.max_bs,
        token_budget=sys.maxsize,
        num_rows=setting.max_bs * setting.in_flight,
        n_workers=setting.in_flight,
    )


def _request_level(setting: Setting) -> RequestLevelScheduler:
    return RequestLevelScheduler(setting.max_bs, ceil_div(setting.max_bs, setting.mbs), setting.mbs)


POLICIES: Mapping[str, Policy] = {
    "orca": Policy(lambda setting: OrcaScheduler(setting.max_bs, setting.in_flight)),
    "ft": Policy(
        faster_transformer.make,
        faster_transformer.full_batches,
        preallocates=True,
        waits=True,
        is_paper_baseline=True,
    ),
    "request_level": Policy(_request_level, preallocates=True, waits=True, is_paper_baseline=True),
    "padded": Policy(padded.make, padded.padded_batches, waits=True),
    "prefill_first": Policy(
        lambda setting: _outside(PrefillFirst(in_flight=setting.in_flight), setting)
    ),
    "chunked": Policy(_chunked),
    "pools": Policy(lambda setting: _outside(Pools(setting.max_bs), setting)),
    "cells": Policy(
        lambda setting: cells.CellScheduler(setting.max_bs, setting.in_flight), has_all_rows=True
    ),
    "token_cells": Policy(
        lambda setting: cells.CellScheduler(setting.max_bs, setting.in_flight, by_token=True),
        has_all_rows=True,
    ),
}
"""By name. `request_level` is the package's own baseline, kinder than `ft`; `chunked` has Sarathi's chunks."""
