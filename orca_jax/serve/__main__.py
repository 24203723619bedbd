"""`python -m orca_jax.serve`: an OpenAI-compatible server over one engine."""

import sys
import time
from collections.abc import Sequence

BEGUN = time.monotonic()  # the imports belong to the start
EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None, begun: float | None = None) -> int:
    """Serve until a signal or the engine's end.

    Args:
        argv: the flags; None for those of this process.
        begun: begin of the start in seconds of `time.monotonic`, for the reported times; None for now.

    Returns:
        0 after SIGINT or SIGTERM, 1 if the engine died or hung, 2 if a setting is wrong, 3 if a process on another host
        was lost. A process with a `node_rank` other than 0 has the statuses of docs/deployment.md.
    """
    from orca_jax.helpers.console import lasting_output

    with lasting_output():
        return _main(argv, time.monotonic() if begun is None else begun)


def _main(argv: Sequence[str] | None, begun: float) -> int:
    from orca_jax.flags import flag_message
    from orca_jax.serve.args import parse_args
    from orca_jax.values.errors import ConfigError

    try:
        config = parse_args(argv)
        # after the flags, so that help and errors come at once
        from orca_jax.serve.server import serve

        return serve(config, begun)
    except ConfigError as error:
        print(f"error: {flag_message(error)}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:  # before the server handles signals
        return 0


if __name__ == "__main__":
    from orca_jax.flags import run_program

    sys.exit(run_program("serve", lambda argv: main(argv, BEGUN)))
