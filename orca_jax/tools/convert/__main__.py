"""`python -m orca_jax convert --model MODEL --output DIR`: the same as `orca-jax convert`."""

import sys
from collections.abc import Sequence

from orca_jax.flags import program, run_program
from orca_jax.helpers.console import lasting_output
from orca_jax.tools.convert.args import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a model. Returns the exit status.

    Raises:
        ConfigError: a flag, the model or the output is wrong; `param` names the flag.
        OSError: the output cannot be written.
    """
    args = make_parser().parse_args(argv)
    # Flags are read before the engine's parts are imported, and paths are checked before JAX is.
    from orca_jax.tools.convert.source import Conversion

    with lasting_output():
        job = Conversion.of(args)
        from orca_jax.tools.convert.write import convert

        convert(job)
        print(f"wrote {args.output}; try: {program('serve')} --model {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("convert", main))
