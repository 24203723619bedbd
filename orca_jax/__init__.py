"""Iteration-level scheduling and selective batching for Transformer generation in JAX."""
