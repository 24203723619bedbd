"""Random model directories: config.json with valid, odd, malformed and unknown settings of every key.

Each directory follows from its family and number alone. This module needs only NumPy and safetensors, and runs on
Python 3.11 too: scripts/record_transformers.py writes the same directories there, and records the results of
transformers for them. Sizes are few, so that the tests compile little.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.model.random_settings import (
    EMBED,
    INNER_ODD,
    INNER_WRONG,
    LAYERS,
    MORE_OF_LLAMA,
    ODD_OF,
    POSITIONS,
    SIZES,
    TOKENS,
    USUAL_OF,
    VOCAB,
    WRONG,
    Settings,
)

FAMILIES = ("gpt2", "llama")
LENGTH, NEW = 24, 8  # tokens of the prompt, and generated ones


@dataclass
class Directory:
    """A directory, before it is written. `strange` has the settings that are not usual: key -> (kind, value)."""

    family: str
    number: int
    config: dict[str, Any]
    generation: dict[str, Any] | None
    sizes: dict[str, Any]  # of the weights
    head: str  # of the file: "none", "equal" or "own"
    strange: dict[str, tuple[str, Any]] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        """A checksum of both JSON files."""
        return zlib.crc32(json.dumps([self.config, self.generation], sort_keys=True).encode())

    def write(self, folder: Path) -> None:
        """Write config.json, generation_config.json if there is one, and the weights."""
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if self.generation is not None:
            (folder / "generation_config.json").write_text(
                json.dumps(self.generation), encoding="utf-8"
            )
        save_file(tensors(self), folder / "model.safetensors", metadata={"format": "pt"})

    def prompt(self, attempt: int) -> list[int]:
        """Random ids; the record names the attempt with clear margins."""
        random = Random(f"prompt {self.family} {self.number} {attempt}")
        return [random.randrange(VOCAB - 1) for _ in range(LENGTH)]


def directory(family: str, number: int) -> Directory:
    """The directory of a number: mostly usual settings, and in two of three directories one or two strange ones."""
    random = Random(f"{family} {number}")
    made = _gpt2(random, number) if family == "gpt2" else _llama(random, number)
    for key, values in USUAL_OF[family].items():
        if random.random() < 0.25:
            made.config[key] = random.choice(values)
    if random.random() < 0.5:
        made.config["eos_token_id"] = random.choice((3, 5, [3, 5]))
    if random.random() < 0.5:
        made.generation = (
            {"eos_token_id": random.choice(TOKENS)} if random.random() < 0.7 else {"top_k": 3}
        )
    for _ in range(random.choice((0, 1, 1, 1, 2, 2))):
        _make_strange(random, made)
    items = list(made.config.items())
    random.shuffle(items)
    made.config = dict(items)
    return made


def _make_strange(random: Random, made: Directory) -> None:
    draw = random.random()
    if draw < 0.15:
        key, value = (
            random.choice(("my_option", "attn_scale", "n_layers", "x" * 99)),
            random.choice((1, None, "a")),
        )
        made.config[key] = value
        made.strange[key] = ("unknown", value)
        return
    odd = draw < 0.65
    table = (
        ODD_OF[made.family]
        if odd
        else {key: WRONG for key in (*USUAL_OF[made.family], *SIZES[made.family])}
    )
    if not odd:
        table = {
            **table,
            "tie_word_embeddings": WRONG,
            **({} if made.family == "gpt2" else dict(MORE_OF_LLAMA)),
        }
    key = random.choice(sorted(table))
    if key in made.strange:
        return
    value = random.choice(table[key])
    made.config[key] = value
    made.strange[key] = ("odd" if odd else "wrong", value)


def _gpt2(random: Random, number: int) -> Directory:
    heads, inner = random.choice((2, 4)), random.choice((24, 4 * EMBED))
    tied, head = random.choice((True, True, False)), random.choice(("none", "equal", "own"))
    names = {"n_embd": EMBED, "n_head": heads, "n_layer": LAYERS, "n_positions": POSITIONS}
    if random.random() < 0.2:  # the other names of the same keys
        names = {
            "hidden_size": EMBED,
            "num_attention_heads": heads,
            "n_layer": LAYERS,
            "n_positions": POSITIONS,
        }
    config: dict[str, Any] = {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        **names,
        "tie_word_embeddings": tied,
    }
    if inner == 4 * EMBED:
        config["n_inner"] = None
    else:
        config["n_inner"] = inner
    if tied and random.random() < 0.3:
        del config["tie_word_embeddings"]
    return Directory("gpt2", number, config, None, {"inner": inner}, head if tied else "own")


def _llama(random: Random, number: int) -> Directory:
    heads, groups, dim = 4, random.choice((2, 4)), random.choice((4, 8))
    tied, head = random.choice((True, False)), random.choice(("none", "equal", "own"))
    biases = random.choice(((False, False), (False, False), (True, True)))
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": dim,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": tied,
        "attention_bias": biases[0],
        "mlp_bias": biases[1],
    }
    for key, default in {
        "head_dim": EMBED // heads,
        "num_key_value_heads": heads,
        "mlp_bias": False,
    }.items():
        if config[key] == default and random.random() < 0.5:
            del config[key]
    made = Directory(
        "llama",
        number,
        config,
        None,
        {"groups": groups, "dim": dim, "bias": biases[0]},
        head if tied else "own",
    )
    if random.random() < 0.75:
        _add_rope(random, made, dim)
    return made


def _add_rope(random: Random, made: Directory, dim: int) -> None:
    """A kind of rotary positions, in the old or new spelling or in both."""
    config = made.config
    kind = random.choice(("default", "linear", "dynamic", "llama3", "yarn", "longrope"))
    rope, theta = _rope(random, kind, dim), random.choice((500.0, 10000.0, 10000))
    spelling = random.choice(("rope_type", "rope_type", "type"))
    where = random.choice(
        ("rope_parameters", "rope_parameters", "rope_scaling", "rope_scaling", "both")
    )
    for place in random.choice(((config,), (rope,), (config, rope), ())):
        place["rope_theta"] = random.choice((theta, theta, 100.0))
    rope[spelling] = kind
    if random.random() < 0.15:
        _make_inner_strange(random, made, rope)
    if where == "both":
        other = (
            rope
            if random.random() < 0.3
            else {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}
        )
        config["rope_parameters"], config["rope_scaling"] = other, rope
    else:
        config[where] = rope
    if random.random() < 0.25:
        config["original_max_position_embeddings"] = random.choice((32, 48))


def _make_inner_strange(random: Random, made: Directory, rope: dict[str, Any]) -> None:
    if random.random() < 0.3:
        key, value = random.choice(INNER_ODD)
    else:
        key, value = random.choice(sorted(rope)), random.choice(INNER_WRONG)
    if random.random() < 0.2 and key in rope:
        del rope[key]
        made.strange[key] = ("missing", None)
        return
    rope[key] = value
    made.strange[key] = ("inner", value)


def _rope(random: Random, kind: str, dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    if kind != "default":
        rope["factor"] = random.choice((2.0, 4.0, 8, 0.5))
    if kind in ("llama3", "yarn", "longrope") and random.random() < 0.8:
        rope["original_max_position_embeddings"] = random.choice(
            (32, 48) if kind == "longrope" else (8, 16, 32, 64)
        )
    if kind == "llama3":
        rope["low_freq_factor"], rope["high_freq_factor"] = random.choice(
            ((1.0, 4.0), (1, 2), (0.5, 0.75))
        )
    if kind == "yarn":
        options: Settings = {
            "beta_fast": (32, 4.0, None),
            "beta_slow": (1, 0.5, None),
            "attention_factor": (None, 0.8),
            "mscale": (None, 0.7, 1, 0),
            "mscale_all_dim": (None, 0.9, 1, 0),
            "truncate": (True, False),
        }
        rope.update(
            {key: random.choice(values) for key, values in options.items() if random.random() < 0.4}
        )
    if kind == "longrope":
        rope["short_factor"] = [1.0 + 0.25 * i for i in range(dim // 2)]
        rope["long_factor"] = [2.0 + 0.5 * i for i in range(dim // 2)]
        if random.random() < 0.4:
            rope["attention_factor"] = random.choice((1.2, None))
        if random.random() < 0.5:
            del rope["factor"]
    return rope


def tensors(made: Directory) -> dict[str, np.ndarray]:
    """The weights, wide enough to make all positions differ. A tensor depends on its name and shape alone."""
    shapes = _gpt2_shapes(made.sizes) if made.family == "gpt2" else _llama_shapes(made.sizes)
    found = {name: _values(name, shape) for name, shape in shapes.items()}
    embedding = found[
        "transformer.wte.weight" if made.family == "gpt2" else "model.embed_tokens.weight"
    ]
    if made.head == "equal":
        found["lm_head.weight"] = embedding.copy()
    elif made.head == "own":
        found["lm_head.weight"] = _values("lm_head.weight", embedding.shape)
    return found


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(f"{name} {shape}".encode()))
    values = random.standard_normal(shape)
    is_scale = ("norm" in name or ".ln_" in name) and name.endswith("weight")
    std = 0.1 if len(shape) == 1 else 1.0 if "embed" in name or ".wte" in name else 0.4
    return np.asarray(std * values + (1.0 if is_scale else 0.0), np.float32)


def _gpt2_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    inner = sizes["inner"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (VOCAB, EMBED),
        "wpe.weight": (POSITIONS, EMBED),
    }
    for layer in range(LAYERS):
        linear = {"attn.c_attn": (EMBED, 3 * EMBED), "attn.c_proj": (EMBED, EMBED)}
        linear |= {"mlp.c_fc": (EMBED, inner), "mlp.c_proj": (inner, EMBED)}
        for name, shape in linear.items():
            shapes[f"h.{layer}.{name}.weight"], shapes[f"h.{layer}.{name}.bias"] = shape, shape[1:]
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (EMBED,), f"h.{layer}.{name}.bias": (EMBED,)}
    shapes |= {"ln_f.weight": (EMBED,), "ln_f.bias": (EMBED,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def _llama_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    query, key = 4 * sizes["dim"], sizes["groups"] * sizes["dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, EMBED),
        "norm.weight": (EMBED,),
    }
    for layer in range(LAYERS):
        linear = {"self_attn.q_proj": (query, EMBED), "self_attn.k_proj": (key, EMBED)}
        linear |= {"self_attn.v_proj": (key, EMBED), "self_attn.o_proj": (EMBED, query)}
        linear |= {
            "mlp.gate_proj": (24, EMBED),
            "mlp.up_proj": (24, EMBED),
            "mlp.down_proj": (EMBED, 24),
        }
        for name, shape in linear.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if sizes["bias"]:
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (EMBED,)
    return {f"model.{name}": shape for name, shape in shapes.items()}
