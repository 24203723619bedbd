"""Schedulers for comparison on simulated devices, each by the name of its systems; no server has them."""

from collections.abc import Mapping

from lab.policies import cells, faster_transformer, padded
from lab.policies.policy import Policy, Setting
from lab.policies.pools import PoolsScheduler
from lab.policies.prefill_first import PrefillFirstScheduler
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.request_level import RequestLevelScheduler

__all__ = ["POLICIES", "Policy", "Setting"]


def _chunked(setting: Setting) -> ChunkedScheduler:
    return ChunkedScheduler(
        setting.max_bs,
        setting.token_budget,
        FirstComeFirstServed(),
        depth=setting.in_flight,
        num_stages=min(setting.num_stages, setting.in_flight),
    )


def _request_level(setting: Setting) -> RequestLevelScheduler:
    return RequestLevelScheduler(setting.max_bs, -(-setting.max_bs // setting.mbs), setting.mbs)


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
    "prefill_first": Policy(lambda setting: PrefillFirstScheduler(setting.max_bs, setting.in_flight)),
    "chunked": Policy(_chunked),
    "pools": Policy(lambda setting: PoolsScheduler(setting.max_bs, setting.in_flight)),
    "cells": Policy(lambda setting: cells.CellScheduler(setting.max_bs, setting.in_flight), has_all_rows=True),
    "token_cells": Policy(
        lambda setting: cells.CellScheduler(setting.max_bs, setting.in_flight, by_token=True), has_all_rows=True
    ),
}
"""By name. `request_level` is the package's own baseline, kinder than `ft`; `chunked` has Sarathi's chunks."""
