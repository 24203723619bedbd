"""Answers a file of requests: `python scripts/batch_generate.py -i in.jsonl -o out.jsonl`. --help lists the flags.

The same as `python -m orca_jax.batch`; docs/batch.md describes input and output.
"""

import sys

from orca_jax.batch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
