"""Our server as a side of a comparison: `python -m lab.peers.own_server --threads N [flags of the server]`.

It prints `@peer {"ready": ...}` with the address once the server answers, and ends with its input, as the servers of
the peers do.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import httpx

from lab.peers.own import use_processors
from lab.peers.side import PREFIX

_END_SECONDS = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until the end of standard input. Returns its exit code if it ends before that."""
    parser = argparse.ArgumentParser(prog="python -m lab.peers.own_server", description=__doc__)
    parser.add_argument("--threads", type=int, required=True, metavar="N", help="processors to use")
    args, flags = parser.parse_known_args(argv)
    use_processors(args.threads)
    # The passes of a comparison have the same prompts, so later ones would find them in the prefix cache.
    flags = ["--no-enable-prefix-caching", "--no-log-requests", *flags]
    command = [sys.executable, "-m", "orca_jax.serve", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = next(
                (
                    found[0]
                    for line in process.stdout
                    if (found := re.search(r"http://[\w.:]+", line))
                ),
                None,
            )
            # a full pipe would stop the server
            threading.Thread(target=process.stdout.read, daemon=True).start()
            if url is None or not _is_ready(url, process):
                return process.wait() or 1
            at = flags.index("--model") if "--model" in flags else len(flags)
            shown = flags[:at] + flags[at + 2 :]  # the model is a folder of this run
            print(PREFIX + json.dumps({"ready": {"url": url, "flags": shown}}), flush=True)
            for _ in sys.stdin:
                pass
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
    return 0


def _is_ready(url: str, process: subprocess.Popen[str]) -> bool:
    """Wait until the server answers. False: it ended."""
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=10, trust_env=False).status_code == httpx.codes.OK:
                return True
        time.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
