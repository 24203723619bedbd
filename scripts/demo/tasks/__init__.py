"""Generators of questions with right answers for the demo model, all seeded and without a limit."""
