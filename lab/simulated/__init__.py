"""Predictions of runs from recorded timelines, on simulated devices."""
