"""Typed decisions: their probabilities beside transformers, their work, their calibration, and public benchmarks."""
