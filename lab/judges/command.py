"""Test the server with third-party clients and tools.

Every client runs in an environment of its own under `.judges`, against a server of its own. A proxy between the two
checks the shape of every response against OpenAI's. A table goes to standard output and into docs/conformance.md. The
exit status is 1 if any check failed.
"""

import argparse
import datetime
import subprocess
import sys

from lab.judges.judging import JUDGES, ROOT, Outcome, judge
from lab.judges.page import Row, update
from orca_jax.values.errors import ConfigError


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"clients to run (default: {', '.join(JUDGES)})",
    )
    parser.add_argument("--no-page", action="store_true", help="do not update docs/conformance.md")


def run(args: argparse.Namespace) -> int:
    """Run the clients of the command line. Return the exit status.

    Raises:
        ConfigError: a name is not a client.
    """
    if unknown := set(args.names) - set(JUDGES):
        message = f"{', '.join(sorted(unknown))} is not a client; use some of {', '.join(JUDGES)}"
        raise ConfigError(message, param="NAME")
    outcomes = {}
    for name in args.names or JUDGES:
        print(f"== {name}", file=sys.stderr, flush=True)
        outcomes[name] = judge(name)
        report(name, outcomes[name])
    rows = {name: row(outcome) for name, outcome in outcomes.items()}
    for name, line in rows.items():
        print(f"{name:26}{'green' if outcomes[name].is_green else 'RED':7}{' | '.join(line)}")
    if not args.no_page:
        update(ROOT / "docs" / "conformance.md", rows, list(JUDGES))
    return int(not all(outcome.is_green for outcome in outcomes.values()))


def report(name: str, outcome: Outcome) -> None:
    """Print the failures, violations and faults of one client."""
    print(f"{name}: responses by status: {dict(sorted(outcome.statuses.items()))}", file=sys.stderr)
    for failure in outcome.failed:
        print(f"{name}: {failure['name']}: {failure['error']}", file=sys.stderr)
    for violation in outcome.violations[:20]:
        print(f"{name}: the response does not have OpenAI's shape: {violation}", file=sys.stderr)
    for fault in outcome.faults:
        print(f"{name}: {fault}", file=sys.stderr)


def row(outcome: Outcome) -> Row:
    """A row of the table."""
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    passed = len(outcome.checks) - len(outcome.failed)
    cases = f", {outcome.cases} generated cases" if outcome.cases else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        versions,
        f"{passed} of {len(outcome.checks)} checks{cases}",
        f"{outcome.statuses.total()} answers, {len(outcome.violations)} violations",
        "yes" if outcome.is_green else "no",
        f"{today}, {commit()}",
    )


def commit() -> str:
    """The short name of the tested commit, marked if the package differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "orca_jax", "checkpoints")
    return (
        f"{git('rev-parse', '--short', 'HEAD') or 'no commit'}{' with changes' if changed else ''}"
    )
