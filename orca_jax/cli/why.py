"""`orca-jax why`: say why tokens of the last prompts of a server were computed again."""

import json
from collections.abc import Sequence

from orca_jax.flags import FlagParser, program

DESCRIPTION = (
    "Say why tokens of the last prompts were computed again: the earlier prompt that shares most, the first token that "
    "differs, or the call for which the cache gave them up. The server needs --explain-cache, and compares prompts of "
    "your key alone."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each prompt, the newest one first. Returns the exit status. Raises OrcaError."""
    args = make_parser().parse_args(argv)
    from orca_jax.cli.remote import RemoteModel  # it imports much, and help comes at once

    with RemoteModel(args.base_url, None, args.api_key_file, {}) as server:
        found = [each for each in server.explanations() if args.id in (None, each["id"])]
    for each in found:
        print(json.dumps(each, ensure_ascii=False) if args.json else _line(each))
    if args.id is not None and not found:
        print(f"the server remembers no prompt of {args.id} with this key")
    return int(not found)


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    parser = FlagParser(program("why"), description=DESCRIPTION)
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="id of an answer; default: the last ones"
    )
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="address of the server"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key of the server"
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects")
    return parser


def _line(each: dict[str, object]) -> str:
    return f"{each['id']}: {each['cached_tokens']} tokens were cached; {each['reason']}"
