"""Run schedulers and policies on requests in virtual time (`run.py`), and check policies (`check.py`)."""

NUM_CASES = 160
"""Random cases of a check."""
