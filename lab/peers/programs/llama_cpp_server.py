"""Runs the server of llama.cpp for `python -m lab peers --online`, with the flags of `llama_cpp.py`."""

from lab.peers.programs.child_server import free_port, serve
from lab.peers.programs.common import arguments, parse
from lab.peers.programs.llama_cpp import MODES, about, model_folder, server_command


def main() -> None:
    """Write the model as GGUF, and run the server until the end of standard input."""
    parser = arguments(__doc__, tuple(MODES), serves=True)
    parser.add_argument(
        "--context",
        type=int,
        default=32_768,
        metavar="N",
        help="tokens of all slots of a GGUF file",
    )
    args = parse(parser)
    port = free_port()
    with model_folder() as folder:
        command = server_command(args, port, folder)
        serve(port, command, about(command))


if __name__ == "__main__":
    main()
