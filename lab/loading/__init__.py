"""Benchmark of the loading of weights."""
