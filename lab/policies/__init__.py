"""The shelf: published schedulers, each a file for `--scheduler FILE.py:CLASS` that needs `orca_jax.policy` alone."""
