"""Measurements of single parts, each a program: `python -m lab.measured.NAME --help`."""
