"""The flags of `orca-jax calibrate`."""

import argparse

from orca_jax.flags import FlagParser, add_model_word, human_int, program

DESCRIPTION = """\
Calibrate decisions by labelled rows, lines of JSON such as

    {"state": "The parcel is broken.", "type": "yes_no", "question": "Is it damaged?", "answer": true}
    {"state": "Hello", "type": "choice", "question": "Tone?", "options": ["kind", "cold"], "answer": "kind"}
    {"state": "Hello", "type": "score", "question": "How kind?", "levels": ["not", "very"], "answer": 1}

Each kind of question gets one temperature and one prior of its labels. The measures after it are cross-validated: each
row is judged by a fit to other rows.
"""


def make_parser() -> FlagParser:
    """Return the parser of the command line."""
    made = FlagParser(
        prog=program("calibrate"),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = made.add_mutually_exclusive_group(required=True)
    add_model_word(model)
    model.add_argument("--model", metavar="MODEL", help="the model that decides")
    made.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="labelled rows, as lines of JSON"
    )
    made.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="file to write, for --calibration"
    )
    made.add_argument(
        "--folds", type=human_int, default=5, metavar="N", help="of the measures (default: 5)"
    )
    made.add_argument(
        "--seed", type=human_int, default=0, metavar="N", help="of the folds (default: 0)"
    )
    made.add_argument(
        "--max-model-len", type=human_int, metavar="N", help="longest prompt; default: the model's"
    )
    return made
