"""`python -m orca_jax.serve`: an OpenAI-compatible server over one engine."""

import sys

from orca_jax.serve.server import main

if __name__ == "__main__":
    sys.exit(main())
