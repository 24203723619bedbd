"""Decisions: the requests of the next iteration, and their rows and pages. Pure Python, no arrays.

`pool` owns requests, `kv` owns memory, a scheduler decides, and `plan` turns the decision into a `StepPlan`.
"""
