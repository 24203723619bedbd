"""Joined updates carry the same content as the single ones."""

from hypothesis import given
from hypothesis import strategies as st

from orca_jax.link.thread_link import MOST_HELD, Outbox
from orca_jax.values.request import RequestMetrics, RequestUpdate

METRICS = RequestMetrics(0.0, 0.0, 0.0, 0.0)


def updates(name: str, count: int) -> list[RequestUpdate]:
    """Updates with `count` tokens; the first has times, the last a finish reason."""
    between = [RequestUpdate(name, (token,)) for token in range(1, count - 1)]
    return [
        RequestUpdate(name, (0,), metrics=METRICS, num_cached=3),
        *between,
        RequestUpdate(name, (count - 1,), finish_reason="length", metrics=METRICS),
    ]


@given(st.lists(st.integers(2, 3 * MOST_HELD), min_size=1, max_size=4), st.booleans())
def test_no_token_is_lost_or_late(lengths: list[int], is_watched: bool) -> None:
    outbox = Outbox()
    queues = {f"r{number}": updates(f"r{number}", length) for number, length in enumerate(lengths)}
    if is_watched:
        for name in queues:
            outbox.watch(name)
    got: dict[str, list[RequestUpdate]] = {name: [] for name in queues}
    while queues:
        step = [queue.pop(0) for queue in queues.values()]
        ready = outbox.take_updates(step)
        for update in ready:
            got[update.request_id].append(update)
        told = {update.request_id for update in ready}
        must = {one.request_id for one in step if one.metrics is not None or is_watched}
        assert must <= told
        queues = {name: queue for name, queue in queues.items() if queue}
    for number, length in enumerate(lengths):
        parts = got[f"r{number}"]
        assert [token for part in parts for token in part.new_ids] == list(range(length))
        assert parts[0].num_cached == 3 and [part.finish_reason for part in parts[:-1]] == [
            None
        ] * (len(parts) - 1)
        assert parts[-1].finish_reason == "length"
        assert len(parts) == (length if is_watched else 2 + (length - 2) // MOST_HELD)
    assert outbox._held == {} and outbox._watched == set()
