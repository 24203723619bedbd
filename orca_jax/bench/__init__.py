"""Benchmarks of the engine, the server and the batch runner. Each prints a table, then one line of JSON."""
