"""The server of llama.cpp for a model directory: written as GGUF, started with continuous batching.

Its flags: `-np N` slots that share each batch (`-cb`), a KV cache of the model's context for each slot, `-t` and `-tb`
threads, no reuse of prompts. A GGUF file is served as it is, with its own prompt caching and one buffer of `--context`
tokens for all slots. The type of the KV cache is llama.cpp's default, float16, in all comparisons.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVER = Path(sys.prefix) / "bin" / "llama-server"


def server_command(args: argparse.Namespace, port: int, folder: str) -> list[str]:
    """Return the command of the server, after the model is written into `folder`."""
    if args.model.endswith(".gguf"):
        return _command(Path(args.model), port, args, args.context, ("--kv-unified",))
    from lab.peers.programs.gguf_model import write_gguf

    path = Path(folder) / f"model-{args.dtype}.gguf"
    write_gguf(Path(args.model), path, args.dtype)
    positions = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))[
        "n_positions"
    ]
    caches = ("--no-cache-prompt", "--cache-ram", "0", *MODES[args.mode])
    return _command(path, port, args, args.max_num_seqs * positions, caches)


def _command(
    path: Path, port: int, args: argparse.Namespace, context: int, caches: Sequence[str]
) -> list[str]:
    threads = str(args.threads)
    return [
        *(
            str(SERVER),
            "-m",
            str(path),
            "--alias",
            "model",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *(
            "-t",
            threads,
            "-tb",
            threads,
            "-np",
            str(args.max_num_seqs),
            "-c",
            str(context),
            "-cb",
            "--no-webui",
        ),
        *caches,
    ]


MODES = {"split": ["--no-kv-unified"], "unified": ["--kv-unified"]}


def version() -> str:
    """Return the version that the server prints."""
    done = subprocess.run([str(SERVER), "--version"], capture_output=True, text=True, check=False)
    return " ".join((done.stdout + done.stderr).split())


def about(command: list[str]) -> dict[str, Any]:
    """Return the settings to report."""
    return {"flags": command[command.index("-t") :], "version": version()}


def model_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the model, removed at the end."""
    return tempfile.TemporaryDirectory()
