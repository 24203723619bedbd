"""Benchmarks on simulated devices: proposals of a replay, and the host's own time."""
