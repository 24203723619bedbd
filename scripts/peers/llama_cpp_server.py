"""Runs the server of llama.cpp for `python -m lab peers --online`, with the flags of `llama_cpp.py`."""

from child_server import free_port, serve
from common import arguments, parse
from llama_cpp import MODES, about, model_folder, server_command


def main() -> None:
    """Write the model as GGUF, and run the server until the end of standard input."""
    args = parse(arguments(__doc__, tuple(MODES), serves=True))
    port = free_port()
    with model_folder() as folder:
        command = server_command(args, port, folder)
        serve(port, command, about(command))


if __name__ == "__main__":
    main()
