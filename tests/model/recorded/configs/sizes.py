"""Sizes and options that the configurations of many families share."""

from random import Random
from typing import Any

VOCAB, POSITIONS = 41, 64
FULL, SLIDING = "full_attention", "sliding_attention"

Config = dict[str, Any]


def llama(draw: Random, number: int) -> Config:
    """The keys of a Llama. The first model of all families has the same sizes, so that its tests compile little."""
    heads = 4 if number == 0 else draw.choice((2, 4))
    return {
        **tokens(),
        "max_position_embeddings": POSITIONS,
        "hidden_size": 16 if number == 0 else draw.choice((16, 24)),
        "intermediate_size": 24 if number == 0 else draw.choice((20, 32)),
        "num_hidden_layers": 2 if number == 0 else draw.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if number == 0 else draw.choice((heads, 2, 1)),
        "head_dim": 8 if number == 0 else draw.choice((6, 8, 12)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
    }


def tokens() -> Config:
    """The vocabulary. Prompts have none of the tokens with a meaning."""
    return {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def without(config: Config, *keys: str) -> Config:
    """The configuration without some keys."""
    return {key: value for key, value in config.items() if key not in keys}


def theta(draw: Random) -> float:
    """The base of rotary positions, small enough that all frequencies matter."""
    return draw.choice((30.0, 100.0, 10000.0))


def rope(
    draw: Random, *, kinds: tuple[str, ...] = ("default", "default", "yarn", "llama3", "linear")
) -> Config:
    """Rotary positions of a random kind."""
    kind = draw.choice(kinds)
    found: Config = {"rope_type": kind, "rope_theta": theta(draw)}
    if kind != "default":
        found["factor"] = draw.choice((2.0, 4.0))
    if kind in ("yarn", "llama3"):
        found["original_max_position_embeddings"] = draw.choice((16, 32))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return found


def hunyuan(draw: Random, number: int) -> Config:
    """The keys of a Hunyuan: most have a fixed stretch of rotary positions."""
    config = llama(draw, number) | {"attention_bias": draw.random() < 0.5}
    if number == 1:
        return config | {"rope_theta": theta(draw)}
    stretch = {"type": "dynamic", "alpha": draw.choice((5.0, 100.0)), "factor": 1.0}
    return config | {"rope_theta": theta(draw), "rope_scaling": stretch}


def windows(draw: Random, config: Config) -> Config:
    """A window, and the layers that have it."""
    kinds = [draw.choice((FULL, SLIDING)) for _ in range(config["num_hidden_layers"] - 2)]
    kinds = [*kinds, *draw.sample((FULL, SLIDING), 2)]
    return {"sliding_window": draw.choice((3, 7, 12)), "layer_types": kinds}


def granite_windows(number: int, num_layers: int) -> Config:
    """Windows of Granite, and the base of positions by layer: 0 is none."""
    bases = [(50.0, 0, 20.0), (30.0, 20.0, 20.0)][number % 2][:num_layers]
    return {"sliding_window": 6, **({"layer_rope_theta": list(bases)} if number else {})}
