"""transformers on the same device and the same trace: its continuous batching, and static batches.

Tried with transformers 5.17 and 5.23, on a CPU.
"""

import importlib.util
from functools import partial
from typing import Any

from lab.device_check.part import Found, Setting, Skip, Write, attempt
from lab.device_check.trace import throughput, trace_of
from orca_jax.tools.bench.workload.generate import WorkloadRequest

MODEL = "preset:llama-3-8b"
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
BATCHES = (32, 128)  # requests in a static batch; the last is the whole trace


def peer(what: str, setting: Setting, write: Write) -> None:
    """Measure transformers in one mode: `what` is "continuous" or "static"."""
    about = {"trace": "orca", "system": f"transformers, {what}", "model": "llama-3-8b"}
    try:
        check_fit(setting)
    except Skip as reason:
        write(**about, skipped=str(reason))
        return
    import torch
    import transformers

    write(torch=torch.__version__, transformers=transformers.__version__)
    model = build(setting.dry_run)
    trace = trace_of(model.config.vocab_size, setting.dry_run)
    if what == "continuous":
        attempt(write, partial(continuous, model, trace, setting.dry_run), **about)
        return
    for size in (4, len(trace)) if setting.dry_run else BATCHES:
        attempt(write, partial(static, model, trace, size), **about, batch=size)


def check_fit(setting: Setting) -> None:
    """Raise `Skip` if no comparison is possible."""
    if setting.kind == "tpu":
        raise Skip("transformers computes with PyTorch, which has no TPU here")
    if setting.model not in (None, MODEL):
        raise Skip(f"the comparison is for {MODEL} alone; leave out --model")
    if missing := [
        name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None
    ]:
        raise Skip(f"{' and '.join(missing)} not installed")
    import torch

    if not setting.dry_run and not torch.cuda.is_available():
        raise Skip("this torch has no GPU")


def build(dry_run: bool) -> Any:
    """Build Llama-3-8B's shape with random weights in bf16 on the GPU; in a dry run two layers on the CPU."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **SHAPE | (SMALL if dry_run else {}), bos_token_id=None, eos_token_id=None
    )
    with torch.device("cpu" if dry_run else "cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def continuous(model: Any, trace: list[WorkloadRequest], dry_run: bool) -> Found:
    """Measure transformers' own iteration-level scheduling over a paged cache.

    As for the engine, memory is allocated, programs are captured and some requests run before the clock starts, and
    prompts share no pages. All else is the default of transformers: flash attention, CUDA graphs and two iterations in
    flight if flash attention is installed, otherwise none of them.
    """
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0
    )
    small = {"num_blocks": 16, "max_batch_tokens": 256} if dry_run else {}
    manager = model.init_continuous_batching(
        generation_config=config,
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            allow_block_sharing=False, **small
        ),
        workload_hints=WorkloadHints(
            max_prompt_length=max(len(request.prompt_ids) for request in trace),
            max_generated_length=max(request.num_output for request in trace),
            num_requests=len(trace),
        ),
    )
    manager.warmup()
    manager.start()
    try:
        run(manager, warm_up_of(trace))
        chosen = manager.continuous_batching_config
        return {
            **throughput(trace, partial(run, manager)),
            "attention": model.config._attn_implementation,
            "cuda_graphs": str(chosen.use_cuda_graph),
            "in_flight": 2 if chosen.use_async_batching else 1,
        }
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)


def warm_up_of(trace: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """The first requests, with short outputs."""
    return [WorkloadRequest(0.0, request.prompt_ids, 4) for request in trace[:4]]


def run(manager: Any, trace: list[WorkloadRequest]) -> int:
    """Run the trace to its end; returns the number of generated tokens.

    Raises:
        RuntimeError: a request failed, or the manager stopped.
    """
    for request in trace:
        manager.add_request(list(request.prompt_ids), max_new_tokens=request.num_output)
    tokens = finished = 0
    while finished < len(trace):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"the manager stopped after {finished} of {len(trace)} requests")
        elif result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        elif result.is_finished():
            finished += 1
            tokens += len(result.generated_tokens)
    return tokens


def static(model: Any, trace: list[WorkloadRequest], size: int) -> Found:
    """Measure static batches in the trace's order, padded on the left, each until its longest member is done."""
    generate(model, warm_up_of(trace))

    def run(trace: list[WorkloadRequest]) -> int:
        return sum(
            generate(model, trace[first : first + size]) for first in range(0, len(trace), size)
        )

    return {**throughput(trace, run), "attention": model.config._attn_implementation}


def generate(model: Any, batch: list[WorkloadRequest]) -> int:
    """Run one batch; returns the number of its tokens, without those beyond a request's own length."""
    import torch

    width = max(len(request.prompt_ids) for request in batch)
    steps = max(request.num_output for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        start = width - len(request.prompt_ids)
        ids[row, start:] = torch.tensor(request.prompt_ids)
        mask[row, start:] = 1
    ids = ids.to(model.device)
    mask = mask.to(model.device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0
        )
    generated = out.cpu().shape[1] - width  # the copy waits for the device
    return sum(min(request.num_output, generated) for request in batch)
