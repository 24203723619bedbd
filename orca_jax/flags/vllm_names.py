"""Tables of the flags and keywords of vLLM, read by `vllm.py`."""

from collections.abc import Mapping

SAME: Mapping[str, str] = {
    "-ac": "--attention-config", "-asc": "--api-server-count", "-cc": "--compilation-config",
    "-dc": "--diffusion-config", "-dcp": "--decode-context-parallel-size", "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address", "-dpb": "--data-parallel-backend", "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb", "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb", "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port", "-dpr": "--data-parallel-start-rank", "-ep": "--enable-expert-parallel",
    "-n": "--nnodes", "-pcp": "--prefill-context-parallel-size", "-q": "--quantization", "-r": "--node-rank",
    "-O": "--optimization-level", "-sc": "--speculative-config",
    "--async-scheduling": "--overlap", "--no-async-scheduling": "--no-overlap",
    "--block-size": "--page-size", "--device-memory-utilization": "--gpu-memory-utilization",
    "--disable-log-requests": "--no-log-requests",
    "--enable-log-requests": "--log-requests", "--no-enable-log-requests": "--no-log-requests",
    "--num-gpu-blocks-override": "--num-pages",
}  # fmt: skip
"""vLLM's names of flags that are here too."""

NO_EFFECT: Mapping[str, str] = {
    "XLA compiles all programs before the first request, and chooses the kernels": """
        all2all-backend= attention-backend= attention-config= compilation-config= cudagraph-capture-sizes*
        cudagraph-metrics disable-cascade-attn disable-custom-all-reduce enable-flashinfer-autotune enforce-eager
        gdn-prefill-backend= ir-op-priority= jit-monitor-mode= jit-monitor-verbose kda-decode-backend=
        kda-prefill-backend= kernel-config= linear-backend= mamba-backend= mamba-ssu-algorithm=
        max-cudagraph-capture-size= max-seq-len-to-capture= moe-backend= optimization-level= performance-mode=
        sparse-indexer-topk-backend=""",
    "the engine always works so, or chooses by itself": """
        cp-kv-cache-interleave-size= cpu-distributed-timeout-seconds= disable-async-output-proc
        disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization
        distributed-timeout-seconds= enable-auto-tool-choice enable-batch-sharded-sampling enable-chunked-prefill
        enable-cumem-allocator enable-expert-parallel enable-nccl-comm-suspend enable-prompt-tokens-details
        enable-reasoning enable-request-id-headers enable-shm-tensor-arena engine-use-ray fully-sharded-loras
        long-prefill-token-threshold= long-prefill-token-threshold-adaptive max-long-partial-prefills=
        max-num-partial-prefills= max-parallel-loading-workers= multi-step-stream-outputs= num-lookahead-slots=
        num-scheduler-steps= numa-bind numa-bind-cpus* numa-bind-nodes* prefix-caching-hash-algo= preemption-mode=
        pt-load-map-location= ray-workers-use-nsight safetensors-load-strategy= safetensors-prefetch-block-size=
        safetensors-prefetch-num-threads= scheduler-reserve-full-isl specialize-active-lora tool-strict-level=
        use-v2-block-manager watermark= worker-use-ray""",
    "there is one front end and one tokenizer per engine": """
        api-server-count= renderer-num-workers= tokenizer-pool-extra-config= tokenizer-pool-size=
        tokenizer-pool-type=""",
    "memory is not swapped to the host": "swap-space=",
    "llguidance makes the masks of grammars": """
        guided-decoding-backend= guided-decoding-disable-additional-properties guided-decoding-disable-any-whitespace
        guided-decoding-disable-fallback structured-outputs-config=""",
    "the HTTP server is not uvicorn, and has no pages of FastAPI": """
        disable-access-log-for-endpoints= disable-fastapi-docs disable-uvicorn-access-log enable-offline-docs
        h11-max-header-count= h11-max-incomplete-event-size= uvicorn-log-level=""",
    "metrics and logs have a fixed content, without texts": """
        aggregate-engine-logging collect-detailed-traces= disable-log-stats enable-layerwise-nvtx-tracing
        enable-log-deltas enable-logging-iteration-details enable-mfu-metrics enable-server-load-tracking
        fail-on-environ-validation kv-cache-metrics kv-cache-metrics-sample= log-error-stack max-log-len=
        per-request-spec-decode-metrics show-hidden-metrics-for-version= use-tqdm-on-load""",
    "there are no images, sounds and videos": """
        allowed-local-media-path= allowed-media-domains* disable-chunked-mm-input disable-mm-preprocessor-cache
        enable-mm-embeds enable-mm-processor-stats enable-tower-connector-lora interleave-mm-strings
        language-model-only limit-mm-per-prompt= media-io-kwargs= mm-device-do-normalize mm-encoder-attn-backend=
        mm-encoder-attn-dtype= mm-encoder-fp8-scale-path= mm-encoder-fp8-scale-save-margin=
        mm-encoder-fp8-scale-save-path= mm-encoder-tp-mode= mm-hasher-algorithm= mm-ipc-gpu-memory-gb=
        mm-processor-cache-gb= mm-processor-cache-type= mm-processor-device= mm-processor-kwargs=
        mm-shm-cache-max-object-size-mb= mm-tensor-ipc= skip-mm-profiling trust-request-mm-kwargs
        video-pruning-method= video-pruning-rate=""",
    "only models of other kinds have it": """
        anthropic-disabled-thinking-effort= cohere-format= cohere-is-reasoning-model enable-flash-late-interaction
        max-lora-cls-labels=""",
}
"""Flags that are taken and named, by the reason: `=` after a name stands for a value, `*` for several."""

ONLY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "chat-template-content-format": (("auto",), "the form is found in the chat template"),
    "config-format": (("auto", "hf"), "a model directory has a config.json"),
    "convert": (("auto", "none"), "embeddings need no conversion"),
    "cpu-offload-gb": (("0", "0.0"), "weights are on the device; use --quantization int8 or int4"),
    "data-parallel-size": (("1",), "one engine is one replica; start a server for each (docs/deployment.md)"),
    "data-parallel-size-local": (("1",), "one engine is one replica; start a server for each (docs/deployment.md)"),
    "decode-context-parallel-size": (("1",), "use --tensor-parallel-size"),
    "device": (("auto", "cpu", "cuda", "tpu"), "JAX has the devices; set JAX_PLATFORMS"),
    "distributed-executor-backend": (("mp", "uni"), "use --nnodes, or python -m orca_jax.deploy.ray_serve"),
    "kv-offloading-size": (("0", "0.0"), "the KV cache is on the device; use --kv-cache-dtype int8"),
    "logprobs-mode": (("raw_logprobs",), "log probabilities are those of the model"),
    "lora-dtype": (("auto",), "adapters have the type of the model"),
    "mamba-cache-dtype": (("auto",), "states have the type of their kernel"),
    "mamba-cache-mode": (("auto", "align", "all", "none"), "the prefix cache has states where it can"),
    "mamba-ssm-cache-dtype": (("auto", "float32"), "states have the type of their kernel"),
    "model-impl": (("auto",), "there is one implementation; --decoder takes your own"),
    "prefill-context-parallel-size": (("1",), "use --tensor-parallel-size"),
    "response-role": (("assistant",), "answers have the role assistant"),
    "runner": (("auto", "generate"), "embeddings are POST /v1/embeddings of the same server"),
    "stream-interval": (("1",), "each iteration sends its tokens; --check-in-interval groups them"),
    "task": (("auto", "generate"), "embeddings are POST /v1/embeddings of the same server"),
    "tokenizer-mode": (("auto",), "tokenizers are read from a tokenizer.json"),
}
"""Flags that are taken and named with one of these values, and refused with another one for the reason."""

REFUSED: Mapping[str, str] = {
    "code of a model or a plug-in is not loaded; --decoder takes your own model (docs/own_models.md)": """
        additional-config code-revision io-processor-plugin logits-processor-pattern logits-processors middleware
        model-class-overrides reasoning-parser-plugin scheduler-cls tool-parser-plugin tool-server trust-remote-code
        worker-cls worker-extension-cls""",
    "the model's files decide; write it into config.json": """
        disable-sliding-window hf-config-path hf-overrides override-neuron-config quantization-config rope-scaling
        rope-theta""",
    "write the values into a generation_config.json, and give its folder with --generation-config": """
        override-generation-config""",
    "a request gives chat_template_kwargs itself": "default-chat-template-kwargs reasoning-config",
    "requests with their own chat template are refused; give --chat-template": "trust-request-chat-template",
    "set HF_TOKEN, or run: hf auth login": "hf-token",
    "give a directory with the tokenizer by --tokenizer": "tokenizer-revision",
    "give a directory that holds the wanted files alone": "ignore-patterns model-loader-extra-config model-weights",
    "use --speculative-config, with method, model and num_speculative_tokens": """
        num-speculative-tokens spec-method spec-model spec-tokens speculative-model""",
    "use --kv-events-endpoint": "kv-events-config",
    "use --num-pages": "kv-cache-memory-bytes",
    "use --max-num-batched-tokens": "max-num-scheduled-tokens",
    "use --max-num-seqs and --max-num-queued-reqs": "max-num-active-seqs",
    "use --log-format; the content is fixed, without texts of clients": """
        enable-log-outputs log-config-file log-level logging-config""",
    "use the timeline (--trace-file) or the profiler of JAX": "enable-trace-replay profiler-config",
    "the buckets of /metrics are fixed": "custom-histogram-buckets",
    "a certificate of the client is always required with --ssl-ca-certs": "ssl-cert-reqs",
    "Python's default ciphers are used; choose others in a proxy": "ssl-ciphers",
    "a new certificate needs a new start; terminate HTTPS in a proxy": "enable-ssl-refresh",
    "all methods and headers are allowed for the origins of --allowed-origins": "allowed-headers allowed-methods",
    "a stream has usage if its request has stream_options.include_usage": "enable-force-include-usage",
    "the response has its documented fields": """
        aux-output-config enable-per-request-metrics enable-return-routed-experts fingerprint-mode fingerprint-value
        return-sampling-mask return-tokens-as-token-ids""",
    "the server has OpenAI's and Anthropic's routes alone (docs/serving.md)": """
        enable-scale-out enable-tokenizer-info-endpoint grpc grpc-port headless tokens-only""",
    "the template gets the tools of every request": "exclude-tools-when-tool-choice-none",
    "use --scheduler orca, whose iterations have whole prompts": "no-enable-chunked-prefill",
    "comments are not sent; raise the read timeout of the proxy": "sse-keep-alive-interval",
    "prompts are texts or token ids": "enable-prompt-embeds skip-tokenizer-init",
    "an embedding's pooling is in its request": "override-pooler-config pooler-config",
    "adapters are LoRA by PEFT, for all layers that they have (docs/adapters.md)": """
        default-mm-loras enable-mixed-moe-lora-format enable-moe-shared-loras enable-prompt-adapter
        long-lora-scaling-factors lora-extra-vocab-size lora-target-modules max-prompt-adapter-token
        max-prompt-adapters""",
    "new weights come by POST /update_weights_from_disk or LLM.update_params": """
        enable-sleep-mode sleep-mode-offload-cudagraph sleep-preserve-parameter-names weight-transfer-config""",
    "weights and KV cache stay on the device; use --quantization and --kv-cache-dtype": """
        cpu-offload-params kv-offloading-backend offload-backend offload-group-size offload-num-in-group offload-params
        offload-prefetch-step""",
    "one engine does prefill and decode": "ec-manager-config ec-transfer-config kv-transfer-config",
    "one engine is one replica; start a server for each (docs/deployment.md)": """
        data-parallel-address data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb
        data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port data-parallel-start-rank
        data-parallel-supervisor-port dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s dp-sync-interval""",
    "experts are divided by width with --tensor-parallel-size": """
        elastic-ep-max-dp-size enable-elastic-ep enable-ep-weight-filter enable-eplb eplb-config
        expert-placement-strategy num-redundant-experts""",
    "it is not implemented": """
        allow-deprecated-quantization dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
        dcp-kv-cache-interleave-size dcp-q-replicate diffusion-config enable-dbo enable-fault-tolerance enable-hc-sp
        enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint engram-config
        fault-tolerance-config kv-cache-dtype-skip-layers kv-sharing-fast-prefill mamba-block-size
        mamba-cache-philox-rounds mamba-config mm-encoder-only prefill-schedule-interval
        prefix-cache-retention-interval prefix-match-unit replayssm-buffer-len swa-bounded-replay ubatch-size
        use-fp64-gumbel use-replayssm watermark-config""",
    "choose devices by CUDA_VISIBLE_DEVICES": "device-ids",
    "it is a setting of the server, and an argument of LLM.chat": "chat-template",
    "it is a setting of the server; SamplingParams are complete": "generation-config",
    "it is a setting of the server": """
        master-addr master-port max-logprobs max-num-queued-reqs max-num-queued-tokens nnodes node-rank
        otlp-traces-endpoint reasoning-parser served-model-name shutdown-timeout""",
}
"""Flags that are refused, by the reason."""
