"""OLMo 2: Llama with norms after attention and MLP, and norms of queries and keys over all heads together."""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import llama
from orca_jax.model.families.base import Family
from orca_jax.model.families.values import HfConfig


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of OLMo 2; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {"vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048}
    config = llama.read_shape(hf, "olmo2", defaults, norm_eps=1e-5)
    return replace(config, **llama.attention_biases(hf), qk_norm="all", residual="post_norm")


OLMO2 = Family(
    name="olmo2",
    models="OLMo 2",
    config_from_hf=config_from_hf,
    keys=llama.KEYS | {"attention_bias"},
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    weights=llama.weights,
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
)
