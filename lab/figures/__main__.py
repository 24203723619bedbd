"""Prints a figure of the documentation as SVG."""

import argparse
from collections.abc import Callable

from .batch import draw_batch
from .paper import draw_increments, draw_partitions, draw_planes, draw_serving
from .path import draw_path
from .rows import draw_pages, draw_requests
from .tour import Tour, take_tour

FIGURES: dict[str, Callable[[Tour], str]] = {
    "path": draw_path,
    "requests": draw_requests,
    "batch": draw_batch,
    "pages": draw_pages,
}
PAPER: dict[str, Callable[[], str]] = {
    "increments": draw_increments,
    "serving": draw_serving,
    "partitions": draw_partitions,
    "planes": draw_planes,
}


def main() -> None:
    """Print one figure: of the tour, after running it, or of the paper."""
    parser = argparse.ArgumentParser(prog="python -m lab.figures", description=__doc__)
    parser.add_argument("name", choices=(*FIGURES, *PAPER), help="name of the figure")
    name = parser.parse_args().name
    print(PAPER[name]() if name in PAPER else FIGURES[name](take_tour()), end="")


if __name__ == "__main__":
    main()
