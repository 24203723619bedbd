"""transformers on the same card and the same trace: its continuous batching, and static batches."""

import importlib.util
import time
from typing import Any

from orca_jax.bench.traces import TraceRequest, make_trace

BATCH = 32  # requests in a static batch


def peer(what: str, dry_run: bool, attention: str | None, write: Any) -> None:
    """`what` is "continuous" or "static"."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        write(system=f"transformers, {what}", skipped="torch or transformers is not installed")
        return
    import torch
    import transformers

    if not dry_run and not torch.cuda.is_available():
        write(system=f"transformers, {what}", skipped="this torch has no GPU")
        return
    model, vocab = build(dry_run)
    trace = make_trace("orca", num_requests=6 if dry_run else 128, vocab_size=vocab, seed=0, rate=None)
    run = continuous if what == "continuous" else static
    run(model, [TraceRequest(0.0, request.prompt_ids, 4) for request in trace[:4]])
    start = time.perf_counter()
    tokens = run(model, trace)
    seconds = time.perf_counter() - start
    outputs = sum(request.num_output for request in trace)
    write(
        system=f"transformers, {what}",
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        seconds=seconds,
        tokens_generated=tokens,
        output_tokens_per_s=outputs / seconds,
    )


def build(dry_run: bool) -> tuple[Any, int]:
    """Llama-3-8B's shape with random weights in bf16 on the GPU; in a dry run two layers on the CPU."""
    import torch
    import transformers

    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    if dry_run:
        small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        shape |= {**small, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, bos_token_id=None, eos_token_id=None)
    with torch.device("cpu" if dry_run else "cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval(), int(str(shape["vocab_size"]))


def continuous(model: Any, trace: list[TraceRequest]) -> int:
    """transformers' own iteration-level scheduling over a paged cache."""
    import transformers

    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        for request in trace:
            manager.add_request(list(request.prompt_ids), max_new_tokens=request.num_output)
        tokens = finished = 0
        while finished < len(trace):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
            if result is None and not manager.is_running():
                raise RuntimeError(f"its manager stopped after {finished} of {len(trace)} requests")
        return tokens
    finally:
        manager.stop(block=True)


def static(model: Any, trace: list[TraceRequest]) -> int:
    """Batches in the trace's order, padded on the left, each until its longest member is done."""
    import torch

    tokens = 0
    for first in range(0, len(trace), BATCH):
        batch = trace[first : first + BATCH]
        width, steps = max(len(r.prompt_ids) for r in batch), max(r.num_output for r in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0)
        tokens += sum(request.num_output for request in batch)
    return tokens
