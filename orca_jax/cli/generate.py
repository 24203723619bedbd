"""`orca-jax generate PROMPT`: continue a text, and print the continuation as it comes."""

import json
import sys
from collections.abc import Sequence

from orca_jax.cli.sampling import text_parser, text_source
from orca_jax.errors import RequestError
from orca_jax.flags import FlagParser

DESCRIPTION = "Continue a text. Without PROMPT or with -, the text is read from standard input."


def main(argv: Sequence[str] | None = None) -> int:
    """Print the continuation of a prompt. Returns the exit status. Raises OrcaError."""
    parser = make_parser()
    args = parser.parse_args(argv)
    prompt = _read_input() if args.prompt == "-" else args.prompt
    with text_source(parser, argv) as model:
        pieces = model.continuation(prompt)
        if args.json:
            print(json.dumps({"model": model.name, "prompt": prompt, "text": "".join(pieces)}, ensure_ascii=False))
            return 0
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    parser = text_parser("generate", "[PROMPT] [flags]", DESCRIPTION, max_tokens=64)
    parser.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="text to continue")
    parser.add_argument("--json", action="store_true", help="print one JSON object with prompt and text")
    return parser


def _read_input() -> str:
    if sys.stdin.isatty():
        raise RequestError("PROMPT is missing; give a text, or pipe one into standard input", param="prompt")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise RequestError("standard input is empty; give PROMPT", param="prompt")
    return text
