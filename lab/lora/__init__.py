"""Benchmarks of low-rank adapters."""
