"""`python -m orca_jax COMMAND`: the command `orca-jax`."""

import sys

if __name__ == "__main__":
    from orca_jax.cli.main import main

    sys.exit(main())
