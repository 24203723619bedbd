"""`orca-jax generate PROMPT`: answer a prompt or continue it, and print the text as it comes."""

import json
import sys
from collections.abc import Iterator, Sequence

from orca_jax.cli.sampling import text_parser, text_source
from orca_jax.cli.source import TextSource
from orca_jax.flags import FlagParser
from orca_jax.helpers.bundled import is_preset
from orca_jax.values.errors import RequestError

DESCRIPTION = (
    "Answer a prompt by the model's chat template; with --raw, or without a template, continue it. Without PROMPT or "
    "with -, the prompt is read from standard input."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the text after a prompt. Returns the exit status. Raises OrcaError."""
    parser = make_parser()
    args = parser.parse_args(argv)
    prompt = _read_input() if args.prompt == "-" else args.prompt
    with text_source(parser, argv) as model:
        pieces = model.continuation(prompt) if args.raw else _reply(model, prompt)
        if args.json:
            print(
                json.dumps(
                    {"model": model.name, "prompt": prompt, "text": "".join(pieces)},
                    ensure_ascii=False,
                )
            )
            return 0
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    parser = text_parser("generate", "[PROMPT] [flags]", DESCRIPTION, max_tokens=64)
    parser.add_argument(
        "prompt", nargs="?", default="-", metavar="PROMPT", help="text to answer or to continue"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue PROMPT itself, without the model's chat template",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with prompt and text"
    )
    return parser


def _reply(model: TextSource, prompt: str) -> Iterator[str]:
    """Stream the answer to a prompt; without a chat template of the model, its continuation."""
    if not is_preset(model.name):
        try:
            yield from model.answer([{"role": "user", "content": prompt}])
            return
        except RequestError as error:
            if error.param != "chat_template":
                raise
    yield from model.continuation(prompt)


def _read_input() -> str:
    if sys.stdin.isatty():
        raise RequestError(
            "PROMPT is missing; give a text, or pipe one into standard input", param="prompt"
        )
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise RequestError("standard input is empty; give PROMPT", param="prompt")
    return text
