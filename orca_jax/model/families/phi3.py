"""Phi-3 and Phi-4: Llama with joined projections, and a share of each head that is rotated."""

from orca_jax.model.families import llama
from orca_jax.model.families.base import JoinedPart, Weight, linear
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.windows import window_of_all
from orca_jax.values.config import ModelConfig

_ROPE = RopeRules(
    share=1.0, original=4096, renamed={"su": "longrope"}, kinds=("default", "longrope")
)


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters. Queries, keys and values are parts of one tensor, and so are gate and up."""
    attention, mlp = "layers.{layer}.self_attn", "layers.{layer}.mlp"
    kv_heads = config.num_kv_heads // config.kv_copies
    sizes = tuple(heads * config.head_dim for heads in (config.num_heads, kv_heads, kv_heads))
    return (
        *llama.outer_weights(config),
        *_parts(f"{attention}.qkv_proj", "blocks.attention", ("query", "key", "value"), sizes),
        *linear(f"{attention}.o_proj", "blocks.attention.out", bias=False),
        *_parts(f"{mlp}.gate_up_proj", "blocks.mlp", ("gate", "up"), (config.mlp_dim,) * 2),
        *linear(f"{mlp}.down_proj", "blocks.mlp.down", bias=False),
    )


def _parts(
    key: str, path: str, names: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[Weight, ...]:
    return tuple(
        Weight(
            f"{key}.weight", f"{path}.{name}.kernel", transpose=True, part=JoinedPart(index, sizes)
        )
        for index, name in enumerate(names)
    )


PHI3 = near_llama(
    "phi3",
    "Phi-3, Phi-3.5 and Phi-4 for texts, without experts",
    "Phi3",
    LlamaShape(1e-5, rules=_ROPE),
    lambda hf, config: {"sliding_window": window_of_all(hf, None, config.max_positions)},
    frozenset({"sliding_window"}),
    weights,
    fixed={
        "attention_bias": (False, None),
        "full_attn_mod": (1, None),
        "interpolate_factor": (1, None),
        "lm_head_bias": (False, None),
        "mlp_bias": (False, None),
    },
)
