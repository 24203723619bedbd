"""The leader's judgement of its workers: lost, stuck or diverged. It does no input or output."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.cluster.digest import Digests
from orca_jax.cluster.messages import Report, WorkerBeat
from orca_jax.values.startup import LOADING_SILENCE


@dataclass(slots=True)
class _Watched:
    """The state of one worker."""

    name: str
    silence: float = 0.0  # seconds
    beat: WorkerBeat | None = None


class WorkerWatch:
    """Finds the first worker that is lost, stuck or diverged. One thread calls it, except for `sent` and `own`.

    Args:
        names: the names of the workers, from rank 1 on.
        timeout: seconds of silence, and of no progress, that are too long.
    """

    def __init__(self, names: Sequence[str], timeout: float) -> None:
        self._workers = {rank: _Watched(name) for rank, name in enumerate(names, start=1)}
        self._timeout = timeout
        self._is_serving = False
        self._own: list[Report] = []  # of the leader, appended by its main thread
        # of the leader, by iteration, until all workers have reported it
        self._digests: dict[int, Digests] = {}
        self._reports: dict[int, list[int]] = {}  # ranks, by iteration
        self._waiting: list[tuple[int, Report]] = []  # reports that came before the leader's own
        self.num_sent = 0  # plans; set by the leader's main thread

    def serves(self) -> None:
        """Use the limits of serving workers from now on."""
        self._is_serving = True

    def name(self, rank: int) -> str:
        """The name of a worker for messages."""
        return self._workers[rank].name

    def hear(self, rank: int) -> None:
        """Note a message of a worker."""
        self._workers[rank].silence = 0.0

    def take_beat(self, rank: int, beat: WorkerBeat) -> None:
        """Take a heartbeat."""
        self._workers[rank].beat = beat

    def own(self, iteration: int, digests: Digests) -> None:
        """Take the leader's own digests after an iteration; called by its main thread."""
        self._own.append(Report(iteration, digests))

    def take_report(self, rank: int, report: Report) -> None:
        """Take a worker's digests after an iteration."""
        self._waiting.append((rank, report))

    def verdict(self, passed: float) -> str | None:
        """The reason to count the cluster as lost; None if all is well. `passed` is the time since the last call."""
        for worker in self._workers.values():
            worker.silence += passed
        return self._divergence() or self._silent() or (self._stuck() if self._is_serving else None)

    def _silent(self) -> str | None:
        limit = self._timeout if self._is_serving else max(self._timeout, LOADING_SILENCE)
        silent = [worker for worker in self._workers.values() if worker.silence > limit]
        if not silent:
            return None
        return f"{silent[0].name} has sent nothing for {limit:g} s (--control-timeout)"

    def _stuck(self) -> str | None:
        """The worker that is behind the others, if any of them has exceeded its limit."""
        beats = [
            (worker, worker.beat) for worker in self._workers.values() if worker.beat is not None
        ]
        late = [beat for _, beat in beats if beat.still_seconds > beat.limit_seconds]
        if not late:
            return None
        # All wait for the devices of the one that is stuck, and may exceed their limits before it.
        worker, beat = min(beats, key=lambda pair: (pair[1].num_begun, pair[1].num_done))
        seconds = max(each.limit_seconds for each in late)
        if beat.num_begun < self.num_sent:
            return f"{worker.name} is stuck: it made no progress for {seconds:g} s{_in(beat.place)}"
        return f"the devices made no progress for {seconds:g} s: all processes wait for iteration {beat.num_done}"

    def _divergence(self) -> str | None:
        while self._own:
            own = self._own.pop(0)
            self._digests[own.iteration] = own.digests
        early = []
        for rank, report in self._waiting:
            digests = self._digests.get(report.iteration)
            if digests is None:
                early.append((rank, report))
                continue
            if not digests.agree(report.digests):
                name = self._workers[rank].name
                return f"{name} has diverged: its plan or its tokens of iteration {report.iteration} differ"
            seen = self._reports.setdefault(report.iteration, [])
            seen.append(rank)
            if len(seen) == len(self._workers):
                del self._reports[report.iteration], self._digests[report.iteration]
        self._waiting = early
        return None


def _in(place: str) -> str:
    if not place:
        return ""
    return f" in {place}"
