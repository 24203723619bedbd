"""Functions that the worker of the arena calls, with JSON in and out; the message of `Fault` is for the reader."""

import io
import json
import random
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from orca_jax.timeline.html import html_page
from orca_jax.timeline.measure import Timeline
from orca_jax.tools.simulate.check import find_fault
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, SimulatedRun, simulate
from orca_jax.values.config import ORDERINGS, PREDICTORS, SCHEDULERS
from orca_jax.values.errors import OrcaError

COST = LinearCost(per_iteration=0.02, per_token=0.0005, per_pair=0.0)
"""Seconds of an iteration in the arena."""
PROMPT = (4, 24)
OUTPUT = (2, 40)
"""Bounds of the tokens of a request, as in `bench burst`."""
BUDGET = 64  # tokens of an iteration
PAGE_SIZE = 16
CASES = 60  # of a check
MOST_OUTPUT = 20_000  # characters that a cell may print

for _named in (*SCHEDULERS.values(), *ORDERINGS.values(), *PREDICTORS.values()):
    import_module(_named.place.partition(":")[0])  # by name they would be read as files of a user


class Fault(Exception):
    """A mistake in the text of the reader, in words."""


class _Output(io.StringIO):
    """The first characters of what is printed."""

    def write(self, text: str) -> int:
        room = MOST_OUTPUT - self.tell()
        super().write(text[: max(0, room)])
        return len(text)


def compare(asked: str) -> str:
    """Serve one load under two policies.

    Args:
        asked: {"policies": [{"name", "text"}, ...], "load": {"requests", "batch", "rows", "pages", "gap_ms", "seed"}};
            without a text the name is that of a scheduler of the engine, and 0 pages are enough for all rows.

    Returns:
        {"html": the page of both runs}.

    Raises:
        Fault: a policy is wrong.
    """
    given = json.loads(asked)
    runs = [_run(number, each, given["load"]) for number, each in enumerate(given["policies"], 1)]
    return json.dumps({"html": html_page(*runs)})


def check(asked: str) -> str:
    """Look for a fault of a policy in small random cases; returns {"text": what was found}."""
    policy = json.loads(asked)
    kind = _policy(policy["name"], policy["text"], 1)
    try:
        fault = find_fault(kind, num_cases=CASES)
    except OrcaError as error:
        raise Fault(_words(error)) from error
    return json.dumps({"text": fault or f"No fault in {CASES} cases.", "isFault": bool(fault)})


def run_lab(asked: str) -> str:
    """Run the cells of a lab in order, as a notebook does.

    Returns:
        {"text": what they printed, "html": the page of the last simulation, or ""}.

    Raises:
        Fault: a cell raised an exception.
    """
    names = sys.modules["__main__"].__dict__
    kept = dict(names)
    output = _Output()
    try:
        for number, text in enumerate(json.loads(asked), 1):
            _execute(text, f"cell {number}", names, output)
        html = _page_of(names)
    finally:
        names.clear()
        names.update(kept)
    return json.dumps({"text": output.getvalue(), "html": html})


def _page_of(names: Mapping[str, Any]) -> str:
    """The page of the last simulation that a cell keeps; "" without one."""
    runs = [each for each in names.values() if isinstance(each, SimulatedRun)]
    if not runs:
        return ""
    return html_page(_titled(runs[-1].timeline, "Your run"))


def _run(number: int, policy: Mapping[str, str], load: Mapping[str, int]) -> Timeline:
    name = policy["name"]
    kind: str | type[Any] = name
    settings: dict[str, Any] = {"max_num_seqs": load["batch"]}
    if policy.get("text"):
        kind = _policy(name, policy["text"], number)
        if hasattr(kind, "decide"):
            settings["max_num_rows"] = max(load["rows"], load["batch"])
    if load["pages"]:
        settings["num_pages"] = load["pages"]
    try:
        run = simulate(
            kind,
            burst(load),
            COST,
            max_num_batched_tokens=BUDGET,
            page_size=PAGE_SIZE,
            **settings,
        )
        return _titled(run.timeline, ("First", "Second")[number - 1])
    except OrcaError as error:
        raise Fault(f"{name}: {_words(error)}") from error


def burst(load: Mapping[str, int]) -> Sequence[SimulatedRequest]:
    """Return requests with lengths drawn from `PROMPT` and `OUTPUT`, one each `gap_ms`."""
    dice = random.Random(f"arena-{load['seed']}")
    gap = load["gap_ms"] / 1000
    return [
        SimulatedRequest(number * gap, dice.randint(*PROMPT), dice.randint(*OUTPUT))
        for number in range(load["requests"])
    ]


def _titled(timeline: Timeline, title: str) -> Timeline:
    """The timeline with a title in place of the name of the toy model."""
    head = replace(timeline.head, config=replace(timeline.head.config, model=title))
    return replace(timeline, head=head)


def _policy(name: str, text: str, number: int) -> type[Any]:
    """The last class of a text that is a policy or an order, in a module of its own."""
    module = ModuleType(f"policy_{number}")
    sys.modules[module.__name__] = module
    _execute(text, name, module.__dict__, _Output())
    found = [
        each
        for each in module.__dict__.values()
        if isinstance(each, type) and each.__module__ == module.__name__
    ]
    policies = [each for each in found if hasattr(each, "decide") or hasattr(each, "key")]
    if not policies:
        raise Fault(f"{name} has no class with `decide` or `key`")
    return policies[-1]


def _execute(text: str, name: str, names: dict[str, Any], output: io.StringIO) -> None:
    """Run a text. Raises Fault: it raised an exception, which is named with its line."""
    try:
        with redirect_stdout(output):
            exec(compile(text, name, "exec"), names)
    except Exception as error:
        printed = output.getvalue()
        raise Fault(f"{printed}{_words(error, name)}") from error


def _words(error: BaseException, name: str = "") -> str:
    """An exception in words, with the last line of the reader's text that it came from."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    lines = [frame.lineno for frame in frames if not frame.filename.endswith(".py")]
    words = str(error)
    if not isinstance(error, OrcaError):
        words = f"{type(error).__name__}: {error}"
    if not lines:
        return words
    place = f"{name}, line" if name else "line"
    return f"{place} {lines[-1]}: {words}"
