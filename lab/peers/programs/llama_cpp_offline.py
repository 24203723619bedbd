"""Runs a workload with llama.cpp's server on the CPU, with continuous batching.

    python -m lab peers --peer llama.cpp

runs this program beside the engine, in an environment that it makes. By hand, after `build_llama_cpp.py`:

    python -m lab peers --write INPUTS
    python -m lab.peers.programs.llama_cpp_offline --workload INPUTS/workload.json --model INPUTS/model --dtype bfloat16

The model is written as GGUF. Requests are prompts of ids, all sent at once over HTTP to the server of llama.cpp, since
llama.cpp has its scheduler in the server. They generate greedily, and no token ends one. The modes are the two
layouts of the server's KV cache: one part for each slot ("split"), or one buffer for all ("unified").
"""

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lab.peers.programs.child_server import free_port, serving
from lab.peers.programs.common import Request, arguments, parse, run
from lab.peers.programs.llama_cpp import MODES, about, model_folder, server_command


def generate(port: int, requests: Sequence[Request]) -> list[int]:
    """Send all requests at once; returns the number of tokens of each."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: _complete(port, request), requests))


def _complete(port: int, request: Request) -> int:
    body = {
        "prompt": request.prompt_ids, "n_predict": request.num_output, "temperature": 0, "ignore_eos": True,
        "cache_prompt": False, "stream": False,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(
            "POST", "/completion", json.dumps(body), {"content-type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "tokens_predicted" not in answer:
        raise SystemExit(f"error: llama-server answered: {answer}")
    return int(answer["tokens_predicted"])


def main() -> None:
    """Start the server and run the passes."""
    args = parse(arguments(__doc__, tuple(MODES)))
    port = free_port()
    with model_folder() as folder:
        command = server_command(args, port, folder)
        with serving(command, port, "/health"):
            run(args, lambda requests: generate(port, requests), (), about(command))


if __name__ == "__main__":
    main()
