"""The executor of a toy, for one process and for several."""

from orca_jax.cluster.messages import ToyJob
from orca_jax.sim.toy import Override, ToyExecutor


def toy_executor(job: ToyJob, override: Override | None = None) -> ToyExecutor:
    """The executor of a toy."""
    return ToyExecutor(
        job.vocab_size,
        (job.num_pages,),
        job.page_size,
        job.num_rows,
        latency=job.latency,
        num_stages=job.num_stages,
        override=override,
        check_pages=False,
    )
