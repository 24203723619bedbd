"""Runs of an engine over requests with the lengths of the paper's trace (section 6)."""
