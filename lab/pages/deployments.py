"""Plans beside published deployments: the split that `orca-jax plan` chooses, and the published one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lab.pages.markdown import wide_table
from orca_jax.model.describe import config_from_hf, preset_values
from orca_jax.tools.plan.accelerators import (
    ITL_TARGET_MS,
    PROMPT_TOKENS,
    PeakShares,
    parse_devices,
)
from orca_jax.tools.plan.memory import Demand
from orca_jax.tools.plan.options import Option, choose, options
from orca_jax.values.config import GPU_MEMORY_UTILIZATION, ModelConfig

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3-70B": preset_values("preset:llama-3-70b"),
    # OpenAI's model card of gpt-oss (arXiv 2508.10925), table 1; the rest are defaults
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    # table 2 of the Qwen3 report (arXiv 2505.09388)
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
}
"""Values of config.json of published models, by name."""


class Deployment(NamedTuple):
    """A published deployment: its devices, how it shares them, and what it says of requests and times."""

    model: str
    devices: str
    tensor: int
    hosts: int
    published: str


DEPLOYMENTS = (
    Deployment(
        "Llama-3-70B",
        "v6e-8",
        8,
        1,
        "vLLM in tpu-recipes (51a4773b): 8 chips at least, 256 requests",
    ),
    Deployment(
        "Llama-3-70B",
        "v5e-32",
        32,
        8,
        '"How to Scale Your Model", part 8, computed: 16 chips at least, some 20 ms a token with full memories',
    ),
    Deployment(
        "Llama-3-70B",
        "h100x4",
        4,
        1,
        "TensorRT-LLM 0.10, float16: 5,210 tokens/s (128 in, 128 out), 3,246 (128 in, 2,048 out)",
    ),
    Deployment(
        "gpt-oss-120b",
        "h200x1",
        1,
        1,
        "vLLM in NVIDIA Dynamo's recipe: MXFP4, each H200 a replica",
    ),
    Deployment(
        "Qwen3-235B-A22B",
        "v6e-64",
        64,
        16,
        "SGLang-Jax in tpu-recipes (168ad4d7), Qwen3-Coder-480B: 16 hosts, experts over 64, attention over 32 chips",
    ),
)


def model_of(deployment: Deployment) -> ModelConfig:
    """The configuration of a deployment's model."""
    return config_from_hf(dict(MODELS[deployment.model]))


def chosen(deployment: Deployment) -> Option:
    """What `orca-jax plan` with its defaults chooses for a deployment's model and devices."""
    demand = Demand("bfloat16", "bfloat16", GPU_MEMORY_UTILIZATION)
    devices = parse_devices(deployment.devices)
    found = options(model_of(deployment), devices, demand, PROMPT_TOKENS, PeakShares())
    option = choose(found, ITL_TARGET_MS)
    assert option is not None, f"{deployment.model} does not fit"
    return option


def block() -> str:
    """A row for each deployment."""
    rows = []
    for each in DEPLOYMENTS:
        option = chosen(each)
        assert option.times is not None, "published rates are known"
        rows.append(
            [
                f"{each.model}, {each.devices}",
                str(option.memory.split.tensor),
                str(option.nodes),
                str(option.memory.rows),
                f"{1e3 * option.times.token_seconds:.1f}",
                f"{option.tokens_per_second:,.0f}",
                each.published,
            ]
        )
    head = ["model, devices", "tensor", "hosts", "rows", "ms/token", "tokens/s", "published"]
    return wide_table(head, rows)
