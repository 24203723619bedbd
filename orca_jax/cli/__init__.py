"""The command `orca-jax`: `main` finds the program of each subcommand, and imports only this one."""
