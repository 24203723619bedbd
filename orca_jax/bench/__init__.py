"""Benchmarks: honest programs over the faces. Each prints a table and ends with one line of JSON."""
