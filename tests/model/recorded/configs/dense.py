"""Configurations of families with an MLP in each layer."""

from collections.abc import Callable
from random import Random

from tests.model.recorded.configs.sizes import (
    FULL,
    POSITIONS,
    SLIDING,
    VOCAB,
    Config,
    granite_windows,
    hunyuan,
    llama,
    rope,
    theta,
    tokens,
    windows,
    without,
)


def cwm(draw: Random, number: int) -> Config:
    """Llama with windows and scaled positions."""
    config = llama(draw, number)
    found = config | {"rope_parameters": rope(draw, kinds=("llama3",))}
    return found | (windows(draw, config) if number else {"sliding_window": 5})


def gemma(draw: Random, number: int) -> Config:
    """Gemma 1."""
    config = llama(draw, number) | {"rope_theta": theta(draw)}
    return config | {"hidden_activation": draw.choice(("gelu_pytorch_tanh", None))}


def internlm3(draw: Random, number: int) -> Config:
    """Llama under another name."""
    bias = draw.random() < 0.5
    return llama(draw, number) | {"rope_theta": theta(draw), "qkv_bias": bias, "bias": bias}


def iquestcoder(draw: Random, number: int) -> Config:
    """Llama under another name."""
    return llama(draw, number) | {"rope_theta": theta(draw)}


def ministral(draw: Random, number: int) -> Config:
    """Mistral with windows of some layers."""
    config = llama(draw, number)
    choice = number % 3
    found = config | {"rope_parameters": rope(draw)}
    return found | (windows(draw, config) if choice == 0 else {"sliding_window": 6})


def olmo3(draw: Random, number: int) -> Config:
    """OLMo 2 with windows."""
    config = llama(draw, number) | {"num_hidden_layers": 5 if number % 3 == 1 else 2}
    found = without(config, "head_dim") | {
        "attention_bias": draw.random() < 0.5,
        "sliding_window": 6,
    }
    found |= {} if number % 3 == 1 else windows(draw, config)
    scaled = rope(draw, kinds=("yarn", "default"))
    if number % 2:
        return found | {
            "rope_parameters": {FULL: scaled, SLIDING: {"rope_type": "default", "rope_theta": 50.0}}
        }
    return found | {
        "rope_theta": scaled["rope_theta"],
        "rope_scaling": without(scaled, "rope_theta"),
    }


def seed_oss(draw: Random, number: int) -> Config:
    """Llama with biases of its own."""
    biases = {"attention_bias": draw.random() < 0.7, "attention_out_bias": draw.random() < 0.5}
    return (
        llama(draw, number)
        | biases
        | {"rope_parameters": rope(draw), "mlp_bias": draw.random() < 0.3}
    )


def starcoder2(draw: Random, number: int) -> Config:
    """Starcoder 2."""
    config = without(llama(draw, number), "head_dim", "rms_norm_eps")
    return config | {
        "rope_theta": theta(draw),
        "norm_epsilon": draw.choice((1e-5, 1e-3)),
        "use_bias": draw.random() < 0.7,
        "sliding_window": draw.choice((None, 7)),
    }


def vaultgemma(draw: Random, number: int) -> Config:
    """VaultGemma."""
    config = llama(draw, number)
    return config | {
        "rope_theta": theta(draw),
        "query_pre_attn_scalar": draw.choice((8, 20)),
        "attn_logit_softcapping": draw.choice((None, 2.0)),
        "final_logit_softcapping": draw.choice((None, 20.0)),
        **windows(draw, config),
    }


def gpt_bigcode(draw: Random, number: int) -> Config:
    """StarCoder 1."""
    return {
        **tokens(),
        "n_embd": 16,
        "n_head": draw.choice((2, 4)),
        "n_layer": 2,
        "n_positions": 64,
        "n_inner": draw.choice((None, 24)),
        "multi_query": draw.random() < 0.6,
        "scale_attn_weights": draw.random() < 0.7,
        "layer_norm_epsilon": draw.choice((1e-5, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def gpt_neo(draw: Random, number: int) -> Config:
    """GPT-Neo."""
    return {
        **tokens(),
        "hidden_size": 16,
        "num_heads": draw.choice((2, 4)),
        "num_layers": 4,
        "attention_types": draw.choice(
            ([[["global", "local"], 2]], [[["local"], 3], [["global"], 1]])
        ),
        "window_size": draw.choice((3, 9)),
        "max_position_embeddings": 64,
        "intermediate_size": draw.choice((None, 24)),
        "layer_norm_epsilon": draw.choice((1e-5, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def biogpt(draw: Random, number: int) -> Config:
    """BioGPT."""
    return {
        **tokens(),
        "hidden_size": 16,
        "num_attention_heads": draw.choice((2, 4)),
        "num_hidden_layers": 2,
        "intermediate_size": draw.choice((20, 24)),
        "max_position_embeddings": 64,
        "scale_embedding": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def ministral3(draw: Random, number: int) -> Config:
    """Ministral 3."""
    scaling = rope(draw, kinds=("yarn",)) | {"llama_4_scaling_beta": draw.choice((0.1, 0.7))}
    return llama(draw, number) | {
        "rope_parameters": scaling,
        "sliding_window": draw.choice((None, 9)),
    }


def biases(draw: Random) -> Config:
    """Biases of attention and of MLPs."""
    return {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}


def granite(draw: Random, number: int) -> Config:
    """Granite 3, and HyperCLOVA X."""
    config = without(llama(draw, number), "head_dim") | {"rope_theta": theta(draw), **biases(draw)}
    return config | {
        "attention_multiplier": draw.choice((0.3, 0.5)),
        "embedding_multiplier": draw.choice((1.5, 3.0)),
        "logits_scaling": draw.choice((0.8, 2.0)),
        "residual_multiplier": draw.choice((0.4, 0.7)),
    }


def granite_swa(draw: Random, number: int) -> Config:
    """Granite with windows and sinks."""
    config = granite(draw, number) | {"mlp_bias": number == 1}
    return config | granite_windows(number, config["num_hidden_layers"])


def hyperclovax(draw: Random, number: int) -> Config:
    """HyperCLOVA X."""
    config = granite(draw, number) | {
        "use_post_norm": number % 3 != 1,
        "head_dim": draw.choice((4, 8)),
    }
    return without(config, "attention_multiplier") if number % 2 else config


def arcee(draw: Random, number: int) -> Config:
    """AFM."""
    return llama(draw, number) | {"rope_parameters": rope(draw), **biases(draw)}


def nemotron(draw: Random, number: int) -> Config:
    """Nemotron 4."""
    config = (
        without(llama(draw, number), "rms_norm_eps")
        | biases(draw)
        | {"norm_eps": draw.choice((1e-5, 1e-3))}
    )
    return config | {"rope_theta": theta(draw), "partial_rotary_factor": 0.5, "head_dim": 8}


def jais2(draw: Random, number: int) -> Config:
    """Jais 2."""
    config = (
        without(llama(draw, number), "rms_norm_eps")
        | biases(draw)
        | {"layer_norm_eps": draw.choice((1e-5, 1e-3))}
    )
    return config | {"rope_theta": theta(draw)}


def glm(draw: Random, number: int) -> Config:
    """GLM-4, both types."""
    config = llama(draw, number) | {"rope_theta": theta(draw), "head_dim": draw.choice((8, 16))}
    return config | {"partial_rotary_factor": 0.5, "attention_bias": draw.random() < 0.6}


def glm4(draw: Random, number: int) -> Config:
    """GLM-4 0414."""
    return glm(draw, number)


def ernie4_5(draw: Random, number: int) -> Config:
    """ERNIE 4.5."""
    return llama(draw, number) | {"rope_theta": theta(draw), "use_bias": draw.random() < 0.5}


def helium(draw: Random, number: int) -> Config:
    """Helium, whose heads divide the embedding."""
    config = llama(draw, number) | {"rope_theta": theta(draw), **biases(draw)}
    return config | {"head_dim": config["hidden_size"] // config["num_attention_heads"]}


def cohere(draw: Random, number: int) -> Config:
    """Command R."""
    config = without(llama(draw, number), "rms_norm_eps", "head_dim") | {
        "attention_bias": draw.random() < 0.5
    }
    more = {"layer_norm_eps": draw.choice((1e-5, 1e-3)), "logit_scale": draw.choice((0.25, 0.5))}
    return config | more | {"rope_theta": theta(draw)}


def cohere2(draw: Random, number: int) -> Config:
    """Command R7B."""
    config = cohere(draw, number)
    if number % 3 == 1:
        return config | {"num_hidden_layers": 5, "sliding_window": 6}
    return config | windows(draw, config)


def smollm3(draw: Random, number: int) -> Config:
    """SmolLM 3."""
    config = without(llama(draw, number), "head_dim") | {"rope_theta": theta(draw), **biases(draw)}
    if number % 3 == 1:
        return config | {"num_hidden_layers": 5, "no_rope_layer_interval": 2}
    return config | {
        "no_rope_layers": [number % 2, 1 - number % 2] + [0] * (config["num_hidden_layers"] - 2)
    }


def exaone4(draw: Random, number: int) -> Config:
    """EXAONE 4."""
    config = llama(draw, number) | {"rope_theta": theta(draw)}
    if number % 3 == 1:
        return config | {
            "sliding_window": None,
            "layer_types": [FULL] * config["num_hidden_layers"],
        }
    return config | windows(draw, config) | {"sliding_window_pattern": "LG"}


def hunyuan_v1_dense(draw: Random, number: int) -> Config:
    """Hunyuan without experts."""
    return hunyuan(draw, number)


def phi(draw: Random, number: int) -> Config:
    """Phi 1 to 2."""
    config = without(llama(draw, number), "head_dim", "rms_norm_eps") | {
        "tie_word_embeddings": False
    }
    return config | {
        "rope_theta": theta(draw),
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-3,
    }


def gptj(draw: Random, number: int) -> Config:
    """GPT-J."""
    config = llama(draw, number)
    sizes = {
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_positions": POSITIONS,
    }
    return (
        tokens()
        | sizes
        | {"n_layer": 2, "n_inner": 20 if number else None, "rotary_dim": 2 * (number % 2) + 2}
    )


def gemma4_text(draw: Random, number: int) -> Config:
    """Gemma 4: with inputs of layers and shared keys, or with keys as values."""
    config = without(llama(draw, number), "rms_norm_eps") | {
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config |= {
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "sliding_window": 5,
        "global_head_dim": 12,
    }
    positions = {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": theta(draw),
    }
    config |= {
        "rope_parameters": {
            FULL: positions,
            SLIDING: {"rope_type": "default", "rope_theta": theta(draw)},
        }
    }
    if number == 4:  # layers with the same heads as the shared ones before the last of them
        config |= {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3}
    if number % 2 == 0:
        return config | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB + 3,
        }
    mixture = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    }
    return (
        config
        | mixture
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
        }
    )


def gemma4_unified_text(draw: Random, number: int) -> Config:
    """Gemma 4 12B: without inputs of layers and experts."""
    config = without(
        gemma4_text(draw, 2 * (number % 2)),
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
    )
    if number % 2:
        return config
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return without(config, "num_kv_shared_layers", "use_double_wide_mlp") | keys


def olmo(draw: Random, number: int) -> Config:
    """OLMo 1."""
    config = without(llama(draw, number), "head_dim", "rms_norm_eps") | {"rope_theta": theta(draw)}
    clip = draw.choice((0.4, 0.8)) if number % 2 == 0 else None
    return config | {"attention_bias": draw.random() < 0.5, "clip_qkv": clip}


def nanochat(draw: Random, number: int) -> Config:
    """nanochat."""
    config = without(llama(draw, number), "head_dim") | {
        "rope_parameters": rope(draw, kinds=("default", "yarn")),
        "attention_bias": draw.random() < 0.5,
    }
    return config | {"final_logit_softcapping": (2.0, None, 20.0)[number % 3]}


def apertus(draw: Random, number: int) -> Config:
    """Apertus."""
    config = without(llama(draw, number), "head_dim") | {
        "rope_parameters": rope(draw, kinds=("llama3", "default"))
    }
    return config | {"attention_bias": draw.random() < 0.5}


DENSE: dict[str, Callable[[Random, int], Config]] = {
    maker.__name__: maker
    for maker in (
        biogpt,
        cwm,
        gemma,
        gpt_bigcode,
        gpt_neo,
        internlm3,
        iquestcoder,
        ministral,
        olmo3,
        seed_oss,
        starcoder2,
        vaultgemma,
        ministral3,
        granite,
        granite_swa,
        hyperclovax,
        arcee,
        nemotron,
        jais2,
        glm,
        glm4,
        ernie4_5,
        helium,
        cohere,
        cohere2,
        smollm3,
        exaone4,
        hunyuan_v1_dense,
        phi,
        gptj,
        gemma4_text,
        gemma4_unified_text,
        olmo,
        nanochat,
        apertus,
    )
}
