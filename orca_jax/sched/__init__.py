"""Thinking: which requests run in the next iteration, and what they hold. Pure Python, no arrays.

`pool` owns requests, `kv` owns memory, a scheduler decides, and `planner` writes the decision down as a `StepPlan`.
"""
