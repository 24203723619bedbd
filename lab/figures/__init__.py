"""The figures of `docs/how_it_works.md`: one simulated run of the real engine, drawn as SVG.

__main__.py   the command line: `python -m lab.figures NAME > docs/figures/NAME.svg`
tour.py       the run, and its record
rows.py       the requests by iteration, and the pages by iteration
batch.py      one iteration: the merged batch, and attention by request
path.py       the way of a request through processes
svg.py        shapes, and colours for light and dark pages
"""
