"""Runs a workload with transformers on the CPU, in static or in continuous batches.

    python -m lab peers --peer transformers --environment DIR

runs this program beside the engine, in an environment that it makes if DIR does not exist. By hand:

    python -m lab peers --write INPUTS
    pip install torch==2.13.0+cpu transformers==5.23.0 accelerate psutil
    python -m lab.peers.programs.transformers_offline --workload INPUTS/workload.json --model INPUTS/model --mode static

Use a separate environment (Python 3.11 or later). A build of PyTorch for CPUs alone is enough.

Requests generate greedily, and no token ends one. Static batches are formed in the order of the workload, padded on the
left. A batch runs until its longest member is done, as one call of `generate` does. Tokens beyond a member's own length
are not counted. Continuous batches are those of `generate_batch`: transformers' own scheduler with a paged cache, which
decides the size of a batch itself.
"""

import argparse
import itertools
from collections.abc import Sequence
from itertools import chain
from typing import Any

from lab.peers.programs.common import Request, arguments, parse, read_workload, run


def build(args: argparse.Namespace) -> Any:
    """Load the model."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    model.generation_config.do_sample = False
    model.generation_config.pad_token_id = 0
    return model


def generate_static(model: Any, requests: Sequence[Request], size: int) -> list[int]:
    """Run batches of `size` requests, one after the other; returns the number of tokens of each request."""
    batches = (requests[start : start + size] for start in range(0, len(requests), size))
    return list(chain.from_iterable(_generate_batch(model, batch) for batch in batches))


def _generate_batch(model: Any, batch: Sequence[Request]) -> list[int]:
    """Run one batch to the end of its longest member; returns the tokens of each, without those beyond its length."""
    import torch

    width = max(len(request.prompt_ids) for request in batch)
    steps = max(request.num_output for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        start = width - len(request.prompt_ids)
        ids[row, start:] = torch.tensor(request.prompt_ids)
        mask[row, start:] = 1
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=steps)
    return [min(request.num_output, out.shape[1] - width) for request in batch]


def generate_continuous(manager: Any, requests: Sequence[Request], first: int) -> list[int]:
    """Run all requests in continuous batches, under ids from `first` on; returns the number of tokens of each."""
    counts: dict[str, int] = {}
    ids = [str(first + number) for number in range(len(requests))]
    for name, request in zip(ids, requests, strict=True):
        manager.add_request(request.prompt_ids, request_id=name, max_new_tokens=request.num_output)
    while len(counts) < len(requests):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise SystemExit("error: the thread of transformers' continuous batches ended")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise SystemExit(f"error: request {result.request_id}: {result.error}")
            counts[result.request_id] = len(result.generated_tokens)
    return [counts[name] for name in ids]


def main() -> None:
    """Load the model and run the passes."""
    parser = arguments(__doc__, ("static", "continuous"))
    parser.set_defaults(max_num_seqs=8)
    args = parse(parser)
    model = build(args)
    config = {"attention_implementation": model.config._attn_implementation}
    packages = ("torch", "transformers")
    if args.mode == "static":
        run(
            args,
            lambda requests: generate_static(model, requests, args.max_num_seqs),
            packages,
            config,
        )
        return
    first = itertools.count(0, len(read_workload(args.workload)))  # ids differ between passes
    with model.continuous_batching_context_manager(block=True, timeout=5) as manager:
        run(
            args,
            lambda requests: generate_continuous(manager, requests, next(first)),
            packages,
            config,
        )


if __name__ == "__main__":
    main()
