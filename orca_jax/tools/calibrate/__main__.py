"""`python -m orca_jax calibrate MODEL -i FILE -o FILE`: the same as `orca-jax calibrate`."""

import sys
from collections.abc import Sequence

from orca_jax.flags import run_program
from orca_jax.tools.calibrate.args import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write a calibration, and print its measures. Return the exit status.

    Raises:
        ConfigError: a flag, a file or a row is wrong; `param` names the flag.
    """
    args = make_parser().parse_args(argv)
    # flags are read before the engine's parts are imported
    from orca_jax.tools.calibrate.work import calibrate

    calibrate(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("calibrate", main))
