"""`python -m orca_jax.timeline FILE`: show a timeline that an engine has written with `--trace-file`.

`python -m orca_jax.bench replay FILE` runs its arrivals again under other settings.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

from orca_jax.console import lasting_output
from orca_jax.errors import OrcaError
from orca_jax.flags import FlagParser, program, run_program
from orca_jax.timeline.flags import add_file_args


def main(argv: Sequence[str] | None = None) -> int:
    """Show a file. Return the exit code: 1 if the report was lost, 2 if a flag or the file is wrong."""
    with lasting_output() as output:
        status = _main(argv)
    return 1 if output.is_lost and status == 0 else status


def make_parser() -> FlagParser:
    """Return the parser of the command line."""
    parser = FlagParser(prog=program("timeline"), description=__doc__)
    add_file_args(parser)
    parser.add_argument("--beside", metavar="FILE", help="a second timeline, beside the first one in --html and --plot")
    return parser


def _main(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    from orca_jax.reporting import print_table  # after the flags, so that help and errors come at once
    from orca_jax.timeline.read import figures, load_timeline, shown_figures
    from orca_jax.timeline.views import write_views

    try:
        timeline = load_timeline(args.file)
        found, shown = figures(timeline), shown_figures(timeline)
        write_views(timeline, args, None if args.beside is None else load_timeline(args.beside))
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(f"{args.file}: {timeline.head.config.model}, {timeline.head.config.scheduler}", shown)
    print(json.dumps({**found, "config": dataclasses.asdict(timeline.head.config), "trace": args.file}))
    return 0


if __name__ == "__main__":
    sys.exit(run_program("timeline", main))
