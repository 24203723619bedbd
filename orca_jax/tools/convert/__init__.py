"""`orca-jax convert`: a model of any supported format as a directory with an Orbax checkpoint."""
