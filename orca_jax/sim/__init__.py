"""Executors without a device: the same contract, on a model that can be computed by hand."""
