"""The server of llama.cpp for a model directory: written as GGUF, started with continuous batching.

Its flags: `-np N` slots that share each batch (`-cb`), a KV cache of the model's context for each slot, `-t` and `-tb`
threads, no reuse of prompts. The type of the KV cache is llama.cpp's default, float16, in all comparisons.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SERVER = Path(sys.prefix) / "bin" / "llama-server"


def server_command(args: argparse.Namespace, port: int, folder: str) -> list[str]:
    """Return the command of the server, after the model is written into `folder`."""
    from gguf_model import write_gguf

    path = Path(folder) / f"model-{args.dtype}.gguf"
    write_gguf(Path(args.model), path, args.dtype)
    positions = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))["n_positions"]
    threads, slots = str(args.threads), args.max_num_seqs
    return [
        *(str(SERVER), "-m", str(path), "--alias", "model", "--host", "127.0.0.1", "--port", str(port)),
        *("-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * positions), "-cb"),
        *("--no-cache-prompt", "--cache-ram", "0", "--no-webui", *MODES[args.mode]),
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
