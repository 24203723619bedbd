"""The lab of scheduler tests, with a timeline writer."""

from contextlib import ExitStack

import msgspec

from orca_jax.timeline.measure import Timeline, members
from orca_jax.timeline.read import parse_timeline
from orca_jax.timeline.writer import TIMELINE_VERSION, TimelineHeader, TimelineWriter
from orca_jax.values.config import CacheConfig, EngineConfig
from orca_jax.values.speculation import SpeculativeConfig
from tests.sched.lab import Lab, Shape

ONE = Shape(depth=1, reuses_prefixes=False)


class TracedLab(Lab):
    """Writes its timeline to memory. Each reading of its clock, by the engine or the writer, takes 0.01 s."""

    def __init__(
        self,
        name: str = "orca",
        *,
        shape: Shape | None = None,
        speculative: SpeculativeConfig | None = None,
        **sizes,
    ) -> None:
        super().__init__(name, shape=shape, **sizes)
        config = EngineConfig(
            model="lab",
            scheduler="chunked" if shape else name,
            max_num_seqs=self.max_bs,
            overlap=shape is not None and shape.depth > 1,
            enable_prefix_caching=shape is not None and shape.reuses_prefixes,
            n_workers=1 if shape else self.scheduler.n_workers,
            n_slots=self.kv.n_slots,
            check_in_interval=shape.check_in_interval if shape else 1,
            speculative_config=speculative,
        )
        num_states = 0 if self.kv.states is None else self.kv.states.num_states
        cache = CacheConfig(
            self.kv.groups, self.kv.num_blocks, self.kv.page_size, "float32", num_states=num_states
        )
        budget = shape.budget if shape else 1000
        head = TimelineHeader(
            TIMELINE_VERSION, config, cache, self.pool.max_model_len, budget, (), 0.0
        )
        self.parts: list[bytes] = []
        self.writer = TimelineWriter(
            head, msgspec.json.Encoder().encode_lines, self.parts.append, self._tick
        )
        self.watching = ExitStack()
        self.watching.enter_context(self.engine.observed_by(self.writer))

    def _tick(self) -> float:
        self.now = round(self.now + 0.01, 2)
        return self.now

    @property
    def timeline(self) -> Timeline:
        self.writer.flush()
        return parse_timeline(b"".join(self.parts))


def batches(run: Timeline) -> list[list[tuple[int, int, int]]]:
    """(request, position, tokens) of the members of each iteration."""
    return [sorted(members(iteration)) for iteration in run.iterations]
