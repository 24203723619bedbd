"""Runs the server of vLLM for `python -m lab peers --online`: vLLM's OpenAI-compatible server, set up as in
`vllm_offline.py`.

The engine is a process of its own, and computes on all --threads processors. By default vLLM would reserve one of them
for the front end, a large share of a small machine. The server is started as a module, since the command `vllm` of the
wheel for CPUs looks for a package of another name and fails.
"""

import os
import sys
from pathlib import Path

from lab.peers.programs.child_server import free_port, serve
from lab.peers.programs.common import arguments, parse, versions


def main() -> None:
    """Run the server until the end of standard input."""
    parser = arguments(__doc__, ("eager", "compiled"), serves=True)
    parser.add_argument(
        "--kv-gib", type=int, default=4, metavar="N", help="GiB of KV cache (default: 4)"
    )
    parser.add_argument(
        "--enable-prefix-caching", action="store_true", help="reuse prompts of earlier requests"
    )
    args = parse(parser)
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_PLUGINS="",
        VLLM_CPU_OMP_THREADS_BIND=processors,
    )
    preload = [
        Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library
    ]
    flags = [
        *(
            "--dtype",
            args.dtype,
            "--max-num-seqs",
            str(args.max_num_seqs),
            f"--{'' if args.enable_prefix_caching else 'no-'}enable-prefix-caching",
        ),
        *("--kv-cache-memory-bytes", str(args.kv_gib * 2**30), "--disable-uvicorn-access-log"),
        *(["--enforce-eager"] if args.mode == "eager" else []),
    ]
    port = free_port()
    place = [
        "--model",
        args.model,
        "--served-model-name",
        "model",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    about = {
        "versions": versions(("torch", "transformers", "vllm-cpu")),
        "flags": flags,
        "preload": preload,
    }
    serve(port, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *place, *flags], about)


if __name__ == "__main__":
    main()
