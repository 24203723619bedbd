"""Help texts, placeholders and other spellings of the settings of an engine and a server."""

from collections.abc import Mapping

from orca_jax.config import GPU_MEMORY_UTILIZATION, MAX_LORA_RANK, MAX_LORAS

HELP: Mapping[str, str] = {
    "model": 'model to run: "demo", a directory, a name of the Hugging Face Hub (ORG/NAME), a GGUF file, or '
    '"preset:<name>"',
    "revision": "branch, tag or commit of a model of the Hub; default: its default branch",
    "download_dir": "folder for models of the Hub; default: the cache of huggingface_hub (HF_HOME)",
    "tokenizer": 'directory, tokenizer.json, name of the Hub, or "byte"; default: the tokenizer of the model',
    "decoder": "class of your own decoder, MODULE:CLASS or FILE.py:CLASS; its code is run (docs/own_models.md)",
    "load_format": "checkpoint format; auto: Orbax if there is params/, else safetensors; dummy: random weights",
    "dtype": "type of weights and activations",
    "quantization": "store the weights of linear layers and vocabulary in 8 or 4 bits (default: as in config.json)",
    "seed": "seed of random weights, and of requests without a seed",
    "max_model_len": "most tokens of one request, prompt and output together; default: the model's limit",
    "max_num_seqs": "most requests in one iteration (the paper's max_bs)",
    "scheduler": "orca: iteration-level scheduling as in the paper; chunked: the same with a token budget; "
    "request_level: the paper's baseline",
    "scheduling_policy": "chunked: order of the waiting requests: by arrival (fcfs), priority, fair shares of tenants, "
    "deadline, or predicted length (shortest)",
    "length_predictor": "prediction of output lengths: bound (a request's max_tokens), quantiles (of past requests), "
    "demo (the bundled ranker), or the directory of a ranker (default: bound); for --scheduling-policy shortest",
    "overlap": "chunked: select the next iteration while one runs (default for chunked)",
    "check_in_interval": "chunked: submit so many iterations ahead and read their results together; above 1, tokens "
    "come in groups, and a request that arrives waits for as many iterations",
    "enable_prefix_caching": "chunked: reuse the KV cache pages of earlier prompts with the same beginning "
    "(default for chunked)",
    "n_workers": "iterations in flight (the paper's n_workers); default: one for each pipeline stage",
    "n_slots": "orca and request_level: most tokens of KV cache reserved at once (the paper's n_slots); "
    "default: what fits in memory",
    "tensor_parallel_size": "devices that share every layer; default: 1, and on a CPU as many as the model allows",
    "pipeline_parallel_size": "stages of the model, each with its part of the layers on --tensor-parallel-size devices",
    "page_size": "tokens of one KV cache page",
    "num_pages": "pages of the KV cache; default: what fits in memory",
    "gpu_memory_utilization": "fraction of each accelerator's whole memory for weights and KV cache, above 0 and at "
    f"most 1 (default: {GPU_MEMORY_UTILIZATION})",
    "kv_cache_dtype": "type of the KV cache",
    "enable_lora": "serve low-rank adapters (LoRA) beside the model; docs/adapters.md",
    "max_loras": f"most adapters in one iteration (default: {MAX_LORAS})",
    "max_lora_rank": f"largest rank of an adapter (default: {MAX_LORA_RANK})",
    "max_cpu_loras": "most adapters loaded at once, in the memory of the host (default: 4 times --max-loras)",
    "lora_modules": "adapters to load at start, NAME=PATH each: directories in the format of PEFT",
    "speculative_config": "speculation, as JSON: proposals of next tokens, verified in one iteration, such as "
    '{"method": "ngram", "num_speculative_tokens": 4} (docs/speculation.md)',
    "max_num_batched_tokens": "most tokens in one launch, the largest compiled shape; chunked: in one iteration, at "
    "least --max-num-seqs (default: by --itl-target-ms)",
    "itl_target_ms": "chunked: most milliseconds between two tokens of a request; the token budget is the largest that "
    "keeps it in a measurement at start (default: 250 on a CPU, 100 on accelerators)",
    "compile_cache": 'directory for compiled programs; "auto": in the user\'s cache, "none": no cache',
    "strict_compile": "raise an error on a compilation after start-up, instead of counting it",
    "attention_implementation": "attention kernel; default: the best one for the device",
    "cpu_products": "on a CPU: matrix products and attention of XLA, or of a library (native), which the C compiler of "
    "this machine makes at the first start; auto: native where it is faster (docs/kernels.md)",
    "kernel_self_test": "on accelerators: compare the attention kernels with plain XLA at start, and replace those "
    "that fail",
    "trace_file": "append a timeline of arrivals, iterations and ends to this file, without text or token ids; "
    "orca-jax timeline shows it",
    "progress": "show progress bars on standard error while loading and compiling",
}
ALIASES: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "page_size": ("--block-size",),
}

METAVARS: Mapping[str, str] = {
    **dict.fromkeys(
        ("api_key_file", "chat_template", "cluster_key_file", "mtls_ca_file", "mtls_cert_file", "mtls_key_file"), "FILE"
    ),
    **dict.fromkeys(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "trace_file"), "FILE"),
    **dict.fromkeys(("base_url", "otlp_traces_endpoint"), "URL"),
    **dict.fromkeys(("compile_cache", "download_dir", "generation_config", "lora_dir"), "DIR"),
    **dict.fromkeys(("root_path", "tokenizer", "uds"), "PATH"),
    "allowed_hosts": "NAME",
    "allowed_origins": "ORIGIN",
    "api_key": "KEY",
    "body": "JSON",
    "decoder": "CLASS",
    "host": "ADDRESS",
    "master_addr": "ADDRESS",
    "speculative_config": "JSON",
    "lora_modules": "NAME=PATH",
    "model": "MODEL",
}
"""The placeholders that `--help` shows for values; a flag that is not listed has one by its type."""
JSON_FLAGS = frozenset({"speculative_config"})
"""Flags of JSON objects; a file of `--config` may have mappings for them."""

BRIEF = frozenset(
    {
        "model",
        "tokenizer",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "scheduler",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "config",
        "host",
        "port",
        "api_key_file",
        "served_model_name",
        "chat_template",
    }
)
"""The settings of an engine and a server in the short help."""
