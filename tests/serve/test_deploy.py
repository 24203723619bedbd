"""The files of deploy/ fit the server: their metrics exist, and the tables of docs/operations.md are current."""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orca_jax.link.open_files import MAX_OPEN_FILES
from orca_jax.sched.orderings.deadline import PATIENCE
from orca_jax.sched.orderings.priority import SECONDS_PER_STEP
from orca_jax.serve.accept import MIN_CONNECTIONS, RESERVED_FILES
from orca_jax.serve.connection import MAX_HEADER_BYTES
from orca_jax.serve.telemetry.metrics import END_REASONS, ENGINE_STATES, Metrics
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.tools.plan.__main__ import make_parser as plan_parser
from orca_jax.tools.timeline.__main__ import make_parser as timeline_parser
from orca_jax.values.config import ORDERINGS, EngineConfig
from orca_jax.values.request import MAX_PRIORITY
from tests.project.source import ROOT

DEPLOY = ROOT / "deploy"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SENTENCES = " ".join(OPERATIONS.split())
SCRAPE_LABELS = {"instance", "job", "le"}
NAME = re.compile(r"\b(?:orca_jax_|vllm:|process_)[a-z0-9_]+")
LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


@functools.cache
def published() -> dict[str, set[str]]:
    """The label names of each sample of a server after some use."""
    observer = ServerObserver(ServerConfig())
    observer.call_ended("GET", "/x", 200, 0.1)
    observer.render()
    found = {
        sample.name: set(sample.labels)
        for family in observer.metrics.collect()
        for sample in family.samples
    }
    for line in observer.render().decode().splitlines():
        if line.startswith("process_"):
            found[line.split()[0]] = set()
    return found


def dashboard() -> dict[str, Any]:
    value = json.loads((DEPLOY / "grafana" / "orca-jax.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def load_yaml(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def panel_queries() -> list[str]:
    return [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])
    ]


def variable_queries() -> list[str]:
    queries = [variable["query"] for variable in dashboard()["templating"]["list"]]
    return [query["query"] for query in queries if isinstance(query, dict)]


def alerts() -> list[dict[str, Any]]:
    (document,) = load_yaml("prometheus/alerts.yml")
    return [rule for group in document["groups"] for rule in group["rules"]]


QUERIES = [*panel_queries(), *variable_queries(), *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("query", QUERIES)
def test_query_asks_for_what_there_is(query: str) -> None:
    known = published()
    names = NAME.findall(query)
    assert set(names) <= set(known), "no such metric"
    assert names or query.startswith("up{"), "the query uses no metric of this server"
    labels = set(LABEL.findall(query))
    for inside in re.findall(r"\bby\s*\(([^)]*)\)", query):
        labels |= {label.strip() for label in inside.split(",")}
    assert labels <= SCRAPE_LABELS.union(*(known[name] for name in names)), "no such label"
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_asked_for_growth(query: str) -> None:
    """Queries use the growth of a counter, since its value depends on the start of the server."""
    for name in NAME.findall(query):
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert re.search(rf"\b(?:rate|increase)\({re.escape(name)}(?:{{[^}}]*}})?\[", query), (
                name
            )


def test_queries_name_real_states() -> None:
    states = {state for query in QUERIES for state in re.findall(r'state="(\w+)"', query)}
    assert states and states <= set(ENGINE_STATES)


def test_dashboard_is_whole() -> None:
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids)) > 15
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, "two panels overlap"
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used - {"__rate_interval", "__range"} == variables


@pytest.mark.parametrize(
    "name", ["num_requests_waiting", "kv_cache_usage_perc", "compiles_while_serving_total"]
)
def test_dashboard_shows_what_matters(name: str) -> None:
    assert any(f"orca_jax_{name}" in query for query in panel_queries())


def test_alerts_say_what_to_do() -> None:
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())


def test_prometheus_finds_its_rules_and_the_server() -> None:
    (document,) = load_yaml("prometheus/prometheus.yml")
    (job,) = document["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"localhost:{ServerConfig().port}"]
    for name in document["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()
    asked = {match for query in QUERIES for match in re.findall(r'job="([\w-]+)"', query)}
    assert asked == {job["job_name"]}


# docs/operations.md


def rows(of: str) -> list[list[str]]:
    """The cells of the table rows with a matching first cell."""
    lines = [line for line in OPERATIONS.splitlines() if re.match(rf"\| `{of}", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_metrics_table() -> None:
    documented = {row[0].strip("`"): row[1:] for row in rows("(?:orca_jax_|vllm:)")}
    expected = {}
    for family in Metrics("demo").collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
        expected[name] = [family.type, labels, family.documentation]
    assert documented == expected


def test_limits() -> None:
    assert f"Headers end at {MAX_HEADER_BYTES // 2**10} KiB" in SENTENCES
    assert f"soft limit up to {MAX_OPEN_FILES}" in SENTENCES
    assert f"It keeps {RESERVED_FILES} files for its own use" in SENTENCES
    assert f"fewer than {MIN_CONNECTIONS} connections the server does not start" in SENTENCES


def test_orders_are_as_told() -> None:
    told = {name for name in re.findall(r"^- `([a-z]+)`: ", OPERATIONS, re.MULTILINE)}
    assert told == set(ORDERINGS)
    assert f"from {-MAX_PRIORITY} to {MAX_PRIORITY}" in SENTENCES
    step = SECONDS_PER_STEP
    assert f"{step:g} s for each step of `priority`" in SENTENCES
    assert f"priority 0 overtakes priority 3 for {3 * step:g} s" in SENTENCES
    assert f"at most {2 * MAX_PRIORITY * step:g} s" in SENTENCES
    assert f"as if they had {PATIENCE:g} seconds" in SENTENCES


def test_flags_exist() -> None:
    known = {
        field.name for kind in (ServerConfig, EngineConfig) for field in dataclasses.fields(kind)
    }
    known |= {
        action.dest for parser in (plan_parser(), timeline_parser()) for action in parser._actions
    }
    named = {flag.replace("-", "_") for flag in re.findall(r"`--(?:no-)?([a-z-]+)", OPERATIONS)}
    assert named - {"help"} <= known


def test_words_of_labels_are_all_there() -> None:
    for word in (*END_REASONS, *ENGINE_STATES):
        assert f"`{word}`" in SENTENCES


def test_files_that_are_named_exist() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", OPERATIONS)
    assert targets
    for target in targets:
        assert (Path(ROOT) / "docs" / target.partition("#")[0]).exists(), target
