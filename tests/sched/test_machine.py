"""Submit, abort, step, preempt and reuse in any order: pool and KV manager stay consistent."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orca_jax.sched.request import Request
from orca_jax.values.request import SamplingParams
from tests.sched.lab import VOCAB, Lab, Shape

EOS = 7


class Machine(RuleBasedStateMachine):
    """One engine under `chunked`, with pages for about one and a half of the longest requests."""

    @initialize(
        max_bs=st.integers(1, 4),
        page_size=st.integers(1, 5),
        budget=st.integers(4, 20),
        num_ahead=st.integers(0, 3),
        watermark=st.integers(0, 2),
        spare=st.integers(0, 15),
    )
    def start(
        self,
        max_bs: int,
        page_size: int,
        budget: int,
        num_ahead: int,
        watermark: int,
        spare: int,
    ) -> None:
        pages = -(-(30 + spare) // page_size)
        self.lab = Lab(
            max_bs=max_bs, page_size=page_size, max_model_len=30, eos=[EOS],
            shape=Shape(
                budget=budget,
                depth=1 + num_ahead,
                watermark=watermark,
                num_pages=pages,
                check_in_interval=max(1, num_ahead),
            ),
        )  # fmt: skip
        self.wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()

    @rule(
        stem=st.sampled_from([[], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9, 9]]),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 15),
        min_tokens=st.integers(0, 1),
        salt=st.sampled_from(["", "other"]),
        scored=st.booleans(),
        seed=st.integers(0, 2**31),
    )
    def submit(
        self,
        stem: list[int],
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        salt: str,
        scored: bool,
        seed: int,
    ) -> None:
        request_id = str(len(self.wanted))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            cache_salt=salt,
            prompt_logprobs=1 if scored else None,
            seed=seed,
        )
        self.wanted[request_id] = (stem + tail, params)
        self.lab.engine.add_request(request_id, stem + tail, params)

    @precondition(lambda self: len(self.lab.pool))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([request.request_id for request in self.lab.pool]))
        if self.lab.engine.abort(request_id):
            self.aborted.add(request_id)

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempt at any time, also in flight."""
        self.lab.pool.preempt(data.draw(st.sampled_from(self._running())))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.lab.step()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "lab"):
            self.lab.pool.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        self.lab.run()
        assert set(self.lab.ends) == set(self.wanted), "every request gets one end"
        for request_id, (prompt, params) in self.wanted.items():
            tokens, expected = self.lab.tokens[request_id], self.lab.expected(prompt, params)
            if self.lab.ends[request_id].finish_reason == "abort":
                assert request_id in self.aborted and tokens == expected[: len(tokens)]
            else:
                assert tokens == expected

    def _running(self) -> list[Request]:
        return [
            request for request in self.lab.pool.running.values() if request.finish_reason is None
        ]


class TestMachine(Machine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=30, stateful_step_count=100, deadline=None)


@pytest.mark.slow
class TestMachineForLong(Machine.TestCase):  # type: ignore[misc, valid-type]
    """More than 10,000 steps."""

    settings = settings(max_examples=110, stateful_step_count=100, deadline=None)
