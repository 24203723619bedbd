"""Benchmarks on simulated devices: predictions from recorded timelines, and the host's own time."""
