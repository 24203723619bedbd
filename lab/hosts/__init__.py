"""Benchmarks of an engine over several processes."""
