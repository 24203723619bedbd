"""The flags of the views of a timeline. `views.py` writes them."""

import argparse


def add_file_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the file to read and of the views to write."""
    parser.add_argument(
        "file", metavar="FILE", help="timeline written by --trace-file; of several, the last one"
    )
    parser.add_argument(
        "--perfetto",
        metavar="OUT",
        help="write trace events for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument(
        "--html", metavar="OUT", help="write an HTML page with the requests of each iteration"
    )
    add_plot_args(parser)


def add_plot_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the picture and of the unit of its axis."""
    parser.add_argument("--plot", metavar="OUT", help="draw the timeline to a .png or .svg file")
    parser.add_argument(
        "--plot-unit",
        choices=("iterations", "seconds"),
        help="unit of the axis of --plot (default: iterations)",
    )
