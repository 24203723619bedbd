"""`python -m orca_jax.batch -i INPUT -o OUTPUT [flags]`."""

import sys
from collections.abc import Sequence

from orca_jax.batch.args import parse_args
from orca_jax.batch.config import BatchConfig
from orca_jax.flags import flag_message, run_program
from orca_jax.helpers.console import lasting_output
from orca_jax.values.errors import ConfigError, EngineError, system_message

EXIT_STOPPED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Answer a file of requests.

    Returns:
        0 if every line has its row, possibly an error row. 1 if the engine, the server or the disk ended the run, and
        130 after SIGINT or SIGTERM: the same command resumes the run. 2 if a setting is wrong.
    """
    with lasting_output():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    try:
        config = parse_args(argv)
        # after the flags, so that help and errors come at once
        from orca_jax.batch.run import run_batch

        summary = run_batch(config)
    except ConfigError as error:
        print(f"error: {flag_message(error)}", file=sys.stderr)
        return EXIT_CONFIG
    except (EngineError, OSError) as error:
        message = _system_message(error) if isinstance(error, OSError) else str(error)
        print(f"error: {message}{_hint(config)}", file=sys.stderr)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to resume{_hint(config)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    summary.print()
    return 0


def _system_message(error: OSError) -> str:
    return f"{system_message(error)}; fix this and run the same command again to resume"


def _hint(config: BatchConfig) -> str:
    return "; leave out --overwrite to resume" if config.overwrite else ""


if __name__ == "__main__":
    sys.exit(run_program("batch", main))
