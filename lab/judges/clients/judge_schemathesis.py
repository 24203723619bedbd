"""schemathesis: cases from /openapi.json in all modes and phases, with all checks on each response.

A phase without cases counts as failed: the document lacks its examples or links.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings

PHASES = ("examples", "coverage", "fuzzing", "stateful")
RESPONSES = ("--include-path-regex", "^/v1/responses")
"""A run of its own for the links of stored responses: beside other operations with links, none is made first."""
CONFIG = Path(__file__).with_name("schemathesis.toml")
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")


def run(settings: Settings, folder: Path, phases: Sequence[str], *selection: str) -> dict[str, Any]:
    """Run schemathesis' command line once, for the selected operations; returns its report."""
    report = folder / f"report{len(selection)}.json"
    command = [
        str(Path(sys.executable).with_name("st")),
        *("--config-file", str(CONFIG), "run", f"{settings.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {settings.api_key}"),
        *("--mode", "all", "--phases", ",".join(phases), "--checks", "all", *selection),
        *("--seed", "1", "--workers", "2", "--max-examples", "60", "--continue-on-failure"),
        *("--report", "json", "--report-json-path", str(report)),
    ]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)})
    if not report.exists():
        raise SystemExit(f"schemathesis ended with {done.returncode} and without a report")
    content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return content


def rows(report: dict[str, Any], phases: Sequence[str]) -> list[dict[str, Any]]:
    """The report as checks: one for each phase, each kind of failure, each error and each kind of warning."""
    found: list[dict[str, Any]] = []
    for phase in phases:
        state = report["phases"][phase]
        is_good = state["status"] == "success"
        found.append(
            row(
                phase,
                None if is_good else f"{state['status']}: {state['skip_reason'] or 'see above'}",
            )
        )
    for failure in report["failures"]:
        found.append(
            row(
                failure["type"], f"{failure['title']}: {failure['count']} x {failure['operations']}"
            )
        )
    for error in report["errors"]:
        found.append(row("error", json.dumps(error)[:500]))
    if phases == PHASES:
        tested = report["operations"]["tested"]
        selected = report["operations"]["selected"]
        found.append(
            row(
                "every_operation",
                None if tested == selected else f"{tested} of {selected} were tested",
            )
        )
    for name, entries in report["warnings"].items():
        if entries:
            found.append(row(f"warning_{name}", json.dumps(entries)[:500]))
    return found


def row(name: str, error: str | None) -> dict[str, Any]:
    """One row of the report for the runner."""
    return {"name": name, "seconds": 0.0, "error": error}


def main() -> int:
    """Run schemathesis and translate its report."""
    settings = checks.settings(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        report = run(settings, Path(folder), PHASES)
        linked = run(settings, Path(folder), PHASES[-1:], *RESPONSES)
    outcome = {
        "versions": {"schemathesis": importlib.metadata.version("schemathesis")},
        "checks": rows(report, PHASES) + rows(linked, PHASES[-1:]),
        "cases": report["test_cases"]["generated"] + linked["test_cases"]["generated"],
    }
    settings.report.write_text(json.dumps(outcome, indent=1), encoding="utf-8")
    return int(any(entry["error"] is not None for entry in outcome["checks"]))


if __name__ == "__main__":
    sys.exit(main())
