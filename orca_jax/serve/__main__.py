"""`python -m orca_jax.serve`: an OpenAI-compatible server over one engine."""

import sys
import time

if __name__ == "__main__":
    begun = time.monotonic()  # the imports belong to the start
    from orca_jax.serve.server import main

    sys.exit(main(begun=begun))
