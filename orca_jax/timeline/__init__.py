"""Timelines: arrivals, iterations and ends of an engine, recorded with `--trace-file`, measured and drawn."""
