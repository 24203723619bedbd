"""The leader's executor: it sends each call to the workers, then makes it on its own devices."""

from collections import deque
from collections.abc import Callable, Sequence

from orca_jax.cluster.digest import Digester
from orca_jax.cluster.leader import Leader
from orca_jax.cluster.messages import Iteration, Rest, pack_sets
from orca_jax.values.request import TokenSet
from orca_jax.values.step import Executor, Handle, StepPlan, StepResult


class ClusterExecutor:
    """`step.Executor` over the devices of several processes. It waits for no other process.

    Args:
        local: the executor of this process.
        leader: the leader of the workers, which have equal executors.
    """

    def __init__(self, local: Executor, leader: Leader) -> None:
        self.stats = local.stats  # of this process
        self._local = local
        self._leader = leader
        self._digest = Digester()
        self._payloads: deque[list[bytes]] = deque()  # of the iterations in flight
        self._num_sent = self._num_collected = 0
        self._is_resting = True

    @property
    def expected_seconds(self) -> float:
        """Time that everything submitted and not collected should take, from measurements at start."""
        return self._local.expected_seconds

    def submit(self, plan: StepPlan) -> Handle:
        """Send a plan to all processes."""
        self._is_resting = False
        self._payloads.append([self._leader.call(Iteration(plan, self._num_collected))])
        self._num_sent += 1
        self._leader.sent(self._num_sent)
        return self._explained(lambda: self._local.submit(plan))

    def constrain(self, handle: Handle, allowed: Sequence[TokenSet]) -> None:
        """Send the allowed ids of the newest plan to all processes."""
        self._payloads[-1].append(self._leader.call(pack_sets(allowed)))
        self._explained(lambda: self._local.constrain(handle, allowed))

    def is_ready(self, handle: Handle) -> bool:
        """True if the devices of this process have computed an iteration."""
        return self._local.is_ready(handle)

    def wait(self, handle: Handle) -> None:
        """Wait for the devices of this process, in any thread."""
        self._local.wait(handle)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the result of this process; the workers' results are compared with it later.

        Raises:
            ClusterLostError: the devices failed, since a worker was lost.
        """
        result = self._explained(lambda: self._local.collect(handle))
        self._num_collected += 1
        self._leader.compare(
            result.iteration, self._digest.add_iteration(self._payloads.popleft(), result)
        )
        return result

    def rest(self) -> None:
        """Stop counting idle time on all processes."""
        if not self._is_resting:
            self._is_resting = True
            self._leader.call(Rest())
        self._local.rest()

    def close(self) -> None:
        """End the workers, and free the memory of this process."""
        self._leader.close()
        self._local.close()

    def _explained[T](self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._leader.explain(error) from error
