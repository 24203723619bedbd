"""The page of a timeline: its parts, its data and its safety. test_page_in_browser.py opens it."""

import hashlib
import json
import re
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from orca_jax.timeline.html import MAX_ROWS, MODULES, bundled_script, html_page
from orca_jax.timeline.measure import Timeline, token_times
from orca_jax.timeline.page_data import KINDS, page_data
from orca_jax.timeline.palette import (
    DARK,
    LIGHT,
    PAGE_FOLDER,
    SCHEDULERS,
    curve_styles,
    in_order,
    palette_css,
    scheduler_of,
)
from orca_jax.timeline.spans import request_spans
from tests.timeline.traced import ONE, TracedLab

HOSTILE = "</script><script>alert('B')</script><!--\u2028&amp;"


@pytest.fixture(scope="module")
def run() -> Timeline:
    """Three requests: A, a preempted one with a malicious name, and a waiting C."""
    lab = TracedLab(max_bs=2, page_size=2, shape=ONE._replace(budget=8, num_pages=4))
    for request_id in ("A", HOSTILE, "C"):
        lab.add(request_id, 3, 4)
    lab.run()
    return lab.timeline


class Reader(HTMLParser):
    """Fails if tags do not match; collects the tags with their attributes, and the texts by their tag."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_nothing_is_loaded_and_no_other_script_runs(run: Timeline) -> None:
    reader = Reader(html_page(run))
    for tag, attributes in reader.tags:
        assert not {"src", "href", "style"} & set(attributes), (
            f"{tag} needs the network, or a weaker policy"
        )
        assert not [name for name in attributes if name.startswith("on")]
    assert [each["type"] for each in reader.of("script")] == ["application/json", "module"]
    (policy,) = [each["content"] for each in reader.of("meta") if "http-equiv" in each]
    assert policy is not None
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    data, script = reader.texts["script"]
    (style,) = reader.texts["style"]
    hashes = [
        b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)
    ]
    assert [rules["script-src"], rules["style-src"]] == [f"'sha256-{each}'" for each in hashes]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert not set(data) & set("<>&"), "no tag and no comment can begin in the data"
    assert [each["id"] for each in json.loads(data)["requests"]] == ["A", HOSTILE, "C"]


def test_a_reader_without_scripts_has_figures_and_a_table(run: Timeline) -> None:
    reader = Reader(html_page(run))
    assert "needs JavaScript" in " ".join(reader.texts["p"])
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in reader.of(
        "meta"
    )
    names = [text for text in reader.texts["th"] if text.startswith("#")]
    assert names == ["#0: A", f"#1: {HOSTILE}", "#2: C"]
    cells = reader.texts["td"]
    end, arrival = run.ends[0], run.arrivals[0]
    first = token_times(run)[0][0] - arrival.at
    assert cells[:6] == ["3", "4", "0.000", f"{first:.3f}", f"{end.at - arrival.at:.3f}", "length"]
    assert reader.texts["dt"][1:3] == ["Time to first token", "Latency of an answer"]
    assert any(text.startswith("largest of 3: ") for text in reader.texts["dd"]), (
        "no p99 of three requests"
    )
    assert any("3 requests, 10 iterations" in text for text in reader.texts["p"])


def test_two_timelines_are_beside_each_other(run: Timeline) -> None:
    config = replace(
        run.head.config, scheduler="Turns (sha256:ab)", scheduling_policy="Short (sha256:cd)"
    )
    other = replace(run, head=replace(run.head, config=config))
    reader = Reader(html_page(run, other))
    named = [each["id"] for _, each in reader.tags if each.get("id")]
    assert (
        len(set(named)) == len(named)
        and [name for name in named if name + "2" in named] == named[: len(named) // 2]
    )
    described = [
        each["aria-describedby"] for _, each in reader.tags if each.get("aria-describedby")
    ]
    assert set(described) <= set(named) and len(described) == 4
    assert reader.texts["title"] == [
        f"{run.head.config.model}: {run.head.config.scheduler} beside Turns, Short"
    ]
    assert [each["id"] for each in json.loads(reader.texts["script"][1])["requests"]] == [
        "A",
        HOSTILE,
        "C",
    ]


def test_more_requests_than_rows(run: Timeline) -> None:
    many = Timeline(
        run.head, {n: run.arrivals[0] for n in range(MAX_ROWS + 7)}, run.iterations, run.ends
    )
    text = html_page(many)
    assert (
        text.count('<tr><th scope="row">') == MAX_ROWS and "The chart has 7 more requests." in text
    )


def decoded(request: dict[str, Any]) -> list[tuple[str, ...]]:
    numbers = request["spans"]
    return [(KINDS[numbers[at]], *numbers[at + 1 : at + 5]) for at in range(0, len(numbers), 5)]


def test_the_data_by_hand(run: Timeline) -> None:
    data = page_data(run, token_times(run))
    first, second, third = data["requests"]
    assert decoded(first) == [("chunk", 0, 0, 0, 3), ("increment", 1, 3, 3, 3)]
    assert decoded(second) == [
        ("chunk", 0, 0, 0, 3), ("increment", 1, 1, 3, 1), ("preempted", 2, 3, 0, 0),
        ("chunk", 4, 4, 0, 5), ("increment", 5, 5, 5, 1),
    ]  # fmt: skip
    assert decoded(third) == [
        ("waiting", 0, 5, 0, 0),
        ("chunk", 6, 6, 0, 3),
        ("increment", 7, 9, 3, 3),
    ], "one wait"
    assert (first["prompt"], first["generated"], first["reason"], first["arrival"]) == (
        3,
        4,
        "length",
        0,
    )
    iterations = data["iterations"]
    assert iterations["number"] == [each.iteration for each in run.iterations]
    assert iterations["chunk"] == [6, 0, 0, 0, 5, 0, 3, 0, 0, 0] and not any(iterations["repeat"])
    assert iterations["held"][:4] == ["rows", "rows", "pages", "pages"]
    assert all(
        begin <= end for begin, end in zip(iterations["begin"], iterations["end"], strict=True)
    )
    assert {len(values) for values in iterations.values()} == {len(run.iterations)}


def test_the_data_grow_with_the_spans_and_not_with_the_members() -> None:
    """A request of 50 tokens is two spans and a wait, not 50 cells."""
    lab = TracedLab(max_bs=8, n_slots=500)
    for n in range(24):
        lab.add(f"r{n}", 3, 50)
    lab.run()
    run = lab.timeline
    requests = page_data(run, token_times(run))["requests"]
    assert max(len(each["spans"]) // 5 for each in requests) == 3
    spans = [span for each in request_spans(run).values() for span in each]
    assert sum(span.last - span.first + 1 for span in spans if span.tokens) == 24 * 50


def test_the_bundle_is_one_module() -> None:
    script = bundled_script()
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    assert "</" not in script and "<!--" not in script and "innerHTML" not in script
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", script, re.MULTILINE)
    names += [
        name
        for names in re.findall(r"^const \[([^\]]+)\]", script, re.MULTILINE)
        for name in names.split(", ")
    ]
    assert len(names) > 20 and len(set(names)) == len(names), "a name in two modules"
    for index, module in enumerate(MODULES):
        text = (PAGE_FOLDER / module).read_text(encoding="utf-8")
        for imported, source in re.findall(
            r'^import \{([^}]*)\} from "\./([\w.]+)";', text, re.MULTILINE
        ):
            assert source in MODULES[:index] and " as " not in imported


def test_one_order_and_one_palette_of_schedulers() -> None:
    assert list(SCHEDULERS) == ["request_level", "orca", "chunked"]
    names = ["chunked --overlap", "cells(32)", "orca(32)", "ft(8,8)", "orca(8)"]
    assert [scheduler_of(name) for name in names] == [
        "chunked",
        None,
        "orca",
        "request_level",
        "orca",
    ]
    assert in_order(names) == ["ft(8,8)", "orca(32)", "orca(8)", "chunked --overlap", "cells(32)"]
    styles = curve_styles(names)
    assert list(styles) == in_order(names) and len(set(styles.values())) == len(names)
    assert curve_styles(["orca"])["orca"].color == SCHEDULERS["orca"].color
    assert styles["orca(8)"].marker == styles["orca(32)"].marker != styles["ft(8,8)"].marker


def luminance(color: str) -> float:
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_the_palette_can_be_read(colors: dict[str, str]) -> None:
    assert set(colors) == set(LIGHT)
    for back in ("page", "card"):
        assert all(
            contrast(colors[name], colors[back]) >= 4.5
            for name in ("text", "muted", "accent", "bad")
        )
    marks = [name for name in colors if re.fullmatch(r"r\d", name) or name in SCHEDULERS]
    assert min(contrast(colors[name], colors["card"]) for name in (*marks, "idle")) >= 3
    assert all(f"--{name}: {color};" in palette_css() for name, color in colors.items())
