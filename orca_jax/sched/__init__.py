"""Thinking: which requests run in the next iteration, and what they hold. Pure Python, no arrays.

`pool` owns requests, `kv` owns memory, a scheduler decides, and `planner` writes the decision down as a `StepPlan`.
"""

from orca_jax.config import SchedulerConfig
from orca_jax.errors import ConfigError
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import Scheduler


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler that `config.name` names.

    Raises:
        ConfigError: the name is unknown, or the scheduler cannot do what is asked.
    """
    for param, value in (("max_num_seqs", config.max_num_seqs), ("n_workers", config.n_workers)):
        if value < 1:
            raise ConfigError(f"{param} must be at least 1, got {value}", param=param)
    if config.name == "orca":
        return OrcaScheduler(config.max_num_seqs, config.n_workers)
    if config.name == "request_level":
        return RequestLevelScheduler(config.max_num_seqs, config.n_workers)
    raise ConfigError(f"unknown scheduler {config.name!r}; choose orca or request_level", param="scheduler")
