"""An engine on the toy model around a policy, for tables of batches."""

from collections.abc import Sequence

from lab.policies.ewsjf import Ewsjf
from lab.policies.mc_sf import McSf, SortedF
from lab.policies.plas import Plas
from lab.policies.pools import Pools
from lab.policies.prefill_first import PrefillFirst
from lab.policies.prefix_match import PrefixMatch
from lab.policies.sagesched import SageSched
from lab.policies.sarathi import Sarathi
from lab.policies.skip_join_mlfq import SkipJoinMlfq
from lab.policies.srpt import Srpt
from lab.policies.vtc import VirtualTokenCounter
from orca_jax.policy import Policy
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.values.request import Urgency
from tests.sched.lab import Lab, Shape

SHELF: dict[str, Policy] = {
    "mc_sf": McSf(4),
    "sorted_f": SortedF(4),
    "sagesched": SageSched(quantum=4),
    "ewsjf": Ewsjf(8),
    "vtc": VirtualTokenCounter(),
    "lpm": PrefixMatch(),
    "k_lpm": PrefixMatch(2),
    "sarathi": Sarathi(),
    "skip_join_mlfq": SkipJoinMlfq(4),
    "plas": Plas((4, 8, 16)),
    "srpt": Srpt(),
    "prefill_first": PrefillFirst(),
    "pools": Pools(6, (4, 8)),
}


def lab_of(
    policy: Policy,
    *,
    most: int = 2,
    rows: int = 0,
    budget: int = 100,
    num_pages: int = 60,
    page_size: int = 4,
    depth: int = 1,
    reuses_prefixes: bool = False,
) -> Lab:
    """A toy engine with a policy: `most` jobs and `budget` tokens in an iteration, and rows for more of them."""
    rows = rows or most
    shape = Shape(
        budget=budget,
        depth=depth,
        num_pages=num_pages,
        reuses_prefixes=reuses_prefixes,
        stages=-(-rows // most),
    )
    lab = Lab("chunked", max_bs=most, page_size=page_size, shape=shape)
    lab.scheduler.inner = PolicyScheduler(
        policy, max_bs=most, token_budget=budget, num_rows=rows, n_workers=depth
    )
    lab.scheduler.n_workers = depth
    return lab


def batches(
    lab: Lab, *requests: tuple[str, int, int] | tuple[str, int, int, str], steps: int = 0
) -> Sequence[str]:
    """The batches of requests given as (id, prompt tokens, `max_tokens`, tenant); all arrive after so many steps."""
    for _ in range(steps):
        lab.step()
    for name, num_prompt, max_tokens, *tenant in requests:
        lab.add(name, num_prompt, max_tokens, Urgency(tenant=tenant[0] if tenant else ""))
    lab.run()
    return lab.batches
