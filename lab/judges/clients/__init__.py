"""Programs of the judges: each runs in the environment of its client, with the project on PYTHONPATH."""
