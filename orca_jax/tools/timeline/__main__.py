"""`python -m orca_jax timeline FILE`: show a timeline that an engine has written with `--trace-file`.

`python -m orca_jax bench replay FILE` runs its arrivals again under other settings.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orca_jax.flags import FlagParser, program, run_program
from orca_jax.helpers.console import lasting_output
from orca_jax.tools.timeline.flags import add_file_args
from orca_jax.values.errors import OrcaError

if TYPE_CHECKING:
    from orca_jax.timeline.measure import Timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Show a file. Return the exit code: 1 if the report was lost, 2 if a flag or the file is wrong."""
    with lasting_output() as output:
        status = _main(argv)
    return 1 if output.is_lost and status == 0 else status


def make_parser() -> FlagParser:
    """Return the parser of the command line."""
    parser = FlagParser(prog=program("timeline"), description=__doc__)
    add_file_args(parser)
    parser.add_argument(
        "--beside",
        metavar="FILE",
        help="a second timeline, beside the first one in the table, --html and --plot",
    )
    return parser


def _main(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    # after the flags, so that help and errors come at once
    from orca_jax.helpers.reporting import print_table
    from orca_jax.timeline.measure import shown_figures, side_by_side
    from orca_jax.timeline.read import load_timeline
    from orca_jax.tools.timeline.views import write_views

    try:
        timeline = load_timeline(args.file)
        other = None if args.beside is None else load_timeline(args.beside)
        shown: Mapping[str, Any] = shown_figures(timeline)
        title = _title(args.file, timeline)
        line = _line(args.file, timeline)
        if other is not None:
            shown = side_by_side(shown, shown_figures(other))
            title = f"{title}, then {_title(args.beside, other)}"
            line = {**line, "beside": _line(args.beside, other)}
        write_views(timeline, args, other)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(title, shown)
    print(json.dumps(line))
    return 0


def _title(file: str, timeline: "Timeline") -> str:
    return f"{file}: {timeline.head.config.model}, {timeline.head.config.scheduler}"


def _line(file: str, timeline: "Timeline") -> dict[str, Any]:
    """The figures for the line of JSON."""
    from orca_jax.timeline.measure import figures

    return {**figures(timeline), "config": dataclasses.asdict(timeline.head.config), "trace": file}


if __name__ == "__main__":
    sys.exit(run_program("timeline", main))
