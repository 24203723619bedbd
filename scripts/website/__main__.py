"""Builds the site of the documentation, and serves it on this machine."""

import argparse
import functools
import http.server
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
BUILD = HERE.parents[1] / "build"


def build(out: Path, cache: Path = BUILD / "site-cache", docs: Path = DOCS) -> int:
    """Build the site strictly: a broken link, a missing anchor or a page outside the navigation is an error.

    Returns:
        the exit status.
    """
    from sphinx.cmd.build import main as sphinx

    strict = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    return sphinx(
        [*strict, "--conf-dir", str(HERE), "--doctree-dir", str(cache), str(docs), str(out)]
    )


def serve(out: Path, port: int) -> None:
    """Serve the built site on the loopback address until Ctrl-C. Raises OSError if the port is in use."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(out))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"The site is at http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def main() -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument(
        "command", choices=("build", "serve"), help="build the site, or build it and show it"
    )
    parser.add_argument(
        "--out", type=Path, default=BUILD / "site", help="folder of the site (default: build/site)"
    )
    parser.add_argument(
        "--no-arena",
        action="store_true",
        help="leave out the arena, for which npm fetches Pyodide once",
    )
    parser.add_argument("--port", type=int, default=8008, help="port of `serve` (default: 8008)")
    args = parser.parse_args()
    status = build(args.out)
    if status == 0 and not args.no_arena:
        arena = [sys.executable, "-m", "scripts.arena.build", str(args.out.resolve() / "arena")]
        status = subprocess.run(arena, cwd=BUILD.parent).returncode
    if args.command == "serve" and status == 0:
        try:
            serve(args.out, args.port)
        except OSError as error:
            parser.error(
                f"argument --port: {args.port} cannot be used ({error.strerror}); give another one"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
