"""Benchmarks of the engine and the server. Each prints a table, then one line of JSON."""
