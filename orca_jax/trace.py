"""The old name of `python -m orca_jax.timeline` and of `python -m orca_jax.bench {replay,burst}`."""

import sys
from collections.abc import Sequence

from orca_jax.console import lasting_output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and print its new name to standard error."""
    with lasting_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(words: list[str]) -> int:
    if words[:1] in (["replay"], ["burst"]):
        print(f"python -m orca_jax.trace {words[0]} is now python -m orca_jax.bench {words[0]}", file=sys.stderr)
        from orca_jax.bench.__main__ import main as bench

        return bench(words)
    print("python -m orca_jax.trace is now python -m orca_jax.timeline", file=sys.stderr)
    from orca_jax.timeline.__main__ import main as timeline

    return timeline(words)


if __name__ == "__main__":
    sys.exit(main())
