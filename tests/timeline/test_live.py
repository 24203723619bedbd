"""The timeline of an engine that is watched from some moment on."""

import json
from typing import Any

import msgspec

from orca_jax.sched.observer import Observer, Observers
from orca_jax.timeline.live import LIVE_SECONDS, LiveTimeline
from tests.timeline.traced import ONE, TracedLab


class WatchedLab(TracedLab):
    """A lab whose live timeline can be attached at any time; its own timeline goes on."""

    def watch(self) -> list[dict[str, Any]]:
        """Attach a live timeline; the returned list grows with its lines."""
        lines: list[dict[str, Any]] = []

        def sink(data: bytes) -> None:
            assert data.endswith(b"\n")
            lines.extend(json.loads(line) for line in data.splitlines())

        live = LiveTimeline(
            self.engine, self.writer._head, msgspec.json.Encoder().encode_lines, sink, self._tick
        )
        self.watching.enter_context(self.engine.observed_by(live))
        live.start()
        return lines


def of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line[kind] for line in lines if kind in line]


def test_a_watch_from_the_beginning_sees_what_the_file_has() -> None:
    lab = WatchedLab(max_bs=2, shape=ONE._replace(budget=4))
    lines = lab.watch()
    lab.add("A", 3, 4)
    lab.add("B", 7, 2)
    lab.run()
    (start,) = of_kind(lines, "start")
    assert (start["scheduler"], start["budget"], start["num_rows"], start["requests"]) == (
        "chunked",
        4,
        2,
        [],
    )
    shown = [
        (i["increments"], i["chunks"], i["tokens"], i["running"], i["held"])
        for i in of_kind(lines, "iteration")
    ]
    assert shown == [
        ([], [[0, 0, 3, True], [1, 0, 1, False]], 4, 2, None),
        ([[0, 3]], [[1, 1, 3, False]], 4, 2, None),
        ([[0, 4]], [[1, 4, 3, True]], 4, 2, None),
        ([[0, 5], [1, 7]], [], 2, 2, None),
    ]
    assert [(end["n"], end["reason"], end["generated"]) for end in of_kind(lines, "end")] == [
        (0, "length", 4),
        (1, "length", 2),
    ]
    assert len(lab.timeline.iterations) == 4, "the file has them too"


def test_lines_have_numbers_and_no_names() -> None:
    lab = WatchedLab(max_bs=2, shape=ONE)
    lines = lab.watch()
    lab.add("a-secret-name", 3, 4)
    lab.run()
    assert of_kind(lines, "arrival")[0].keys() == {
        *("n", "at", "prompt", "max_tokens", "call", "shared")
    }
    assert of_kind(lines, "end")[0].keys() == {"n", "at", "reason", "generated"}
    assert "secret" not in json.dumps(lines)


def test_a_watch_begins_between_two_iterations_of_a_busy_engine() -> None:
    lab = WatchedLab(max_bs=2, shape=ONE._replace(budget=8, depth=2))
    for name in "ABC":
        lab.add(name, 3, 4)
    lab.engine.step()
    assert lab.engine.stats.in_flight, "no plan was submitted before the watch"
    lab.engine.abort("C")  # it leaves before the watch, and its update follows
    lines = lab.watch()
    lab.run()
    (start,) = of_kind(lines, "start")
    listed = [(each["n"], each["prompt"], each["has_row"]) for each in start["requests"]]
    assert listed == [(0, 3, True), (1, 3, True)]
    iterations = of_kind(lines, "iteration")
    assert iterations[0]["iteration"] > 0
    assert all(each["tokens"] == len(each["increments"]) for each in iterations), (
        "the first one has no earlier tokens"
    )
    assert {end["n"] for end in of_kind(lines, "end")} == {0, 1}


def test_a_second_start_lists_the_same_requests() -> None:
    lab = WatchedLab(max_bs=1, shape=ONE)
    lab.add("A", 3, 6)
    lines = lab.watch()
    lab.engine.step()
    assert isinstance(lab.engine.observer, Observers)
    live = lab.engine.observer._observers[1]
    assert isinstance(live, LiveTimeline)
    live.start()
    first, second = of_kind(lines, "start")
    assert (
        [each["n"] for each in first["requests"]]
        == [each["n"] for each in second["requests"]]
        == [0]
    )
    assert (first["requests"][0]["computed"], second["requests"][0]["generated"]) == (0, 1)


def test_lines_are_passed_on_in_groups() -> None:
    """Each reading of the clock takes 0.01 s, so an iteration has a tenth of `LIVE_SECONDS` or more."""
    lab = WatchedLab(max_bs=1, shape=ONE)
    groups: list[bytes] = []
    live = LiveTimeline(
        lab.engine, lab.writer._head, msgspec.json.Encoder().encode_lines, groups.append, lab._tick
    )
    lab.watching.close()  # its own writer reads the clock too
    begun = lab.now
    with lab.engine.observed_by(live):
        lab.add("A", 3, 30)
        lab.run()
    assert 1 < len(groups) <= (lab.now - begun) / LIVE_SECONDS + 1 < 30


def test_all_observers_hear_everything() -> None:
    heard: list[tuple[int, str]] = []

    class Ear(Observer):
        def __init__(self, number: int) -> None:
            self.number = number

        def __getattribute__(self, name: str) -> Any:
            if name in events:
                heard.append((object.__getattribute__(self, "number"), name))
            return object.__getattribute__(self, name)

    events = {name for name in vars(Observer) if not name.startswith("_")}
    lab = WatchedLab(max_bs=1, page_size=2, shape=ONE._replace(num_pages=4))
    with lab.engine.observed_by(Ear(0)), lab.engine.observed_by(Ear(1)):
        lab.add("A", 3, 3)
        lab.run()
        lab.engine.observer.flush()
    assert {name for _, name in heard} >= events - {"preempted", "overruled"}
    assert [name for number, name in heard if number == 0] == [
        name for number, name in heard if number == 1
    ]
    assert {name for name in vars(Observers) if not name.startswith("_")} == events
