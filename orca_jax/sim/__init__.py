"""Executors without a device: the same contract, on models computable by hand."""
