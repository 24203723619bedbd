"""Prints a figure of the documentation as SVG."""

import argparse
from collections.abc import Callable

from .batch import draw_batch
from .path import draw_path
from .rows import draw_pages, draw_requests
from .tour import Tour, take_tour

FIGURES: dict[str, Callable[[Tour], str]] = {
    "path": draw_path,
    "requests": draw_requests,
    "batch": draw_batch,
    "pages": draw_pages,
}


def main() -> None:
    """Run the tour and print one figure of it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.figures", description=__doc__)
    parser.add_argument("name", choices=FIGURES, help="name of the figure")
    print(FIGURES[parser.parse_args().name](take_tour()), end="")


if __name__ == "__main__":
    main()
