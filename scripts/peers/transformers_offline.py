"""Runs the trace of `python -m orca_jax.bench offline` with transformers, in static batches on the CPU.

    pip install torch==2.13.0 transformers==5.23.0
    python scripts/peers/transformers_offline.py [--num-requests 64] [--batch-size 8] [--dtype bfloat16]

Use a separate environment (Python 3.11 or later). A build of PyTorch for CPUs alone is enough.

GPT-2 124M with random weights generates greedily, and no token ends a request. Requests form batches in the order of
the trace, padded on the left. A batch runs until its longest member is done, as one call of `generate` does. Tokens
beyond a member's own length are not counted.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from common import GPT2_124M, WorkloadRequest, arguments, report, trace_of, warm_up


def build(dtype: str, seed: int) -> Any:
    """Build GPT-2 124M with random weights."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(**GPT2_124M)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def generate_batch(model: Any, batch: Sequence[WorkloadRequest]) -> list[int]:
    """Run one batch to the end of its longest member; returns the tokens of each, without those beyond its length."""
    width, steps = max(len(request.prompt_ids) for request in batch), max(request.num_output for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        start = width - len(request.prompt_ids)
        ids[row, start:] = torch.tensor(request.prompt_ids)
        mask[row, start:] = 1
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0)
    return [min(request.num_output, out.shape[1] - width) for request in batch]


def main() -> None:
    """Run the trace once and report."""
    parser = arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests in a batch (default: 8)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model, trace = build(args.dtype, args.seed), trace_of(args)

    def generate(requests: Sequence[WorkloadRequest]) -> list[int]:
        batches = (requests[i : i + args.batch_size] for i in range(0, len(requests), args.batch_size))
        return [count for batch in batches for count in generate_batch(model, batch)]

    warm_up(generate, trace)
    start = time.monotonic()
    got = generate(trace)
    wall = time.monotonic() - start
    title = f"transformers, gpt2, {args.num_requests} requests of {args.trace}, batches of {args.batch_size}"
    report(title, ("torch", "transformers"), trace, got, wall, _config(args, model))


def _config(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    return {"peer": "transformers", **vars(args), "attention_implementation": model.config._attn_implementation}


if __name__ == "__main__":
    main()
