"""Files that both sides of a comparison read: the workload as JSON, and a model directory with a tokenizer."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.peers.tokenizer import write_tokenizer
from orca_jax.bench.workload.generate import WorkloadRequest, workload_from_args, workload_settings
from orca_jax.bundled import is_preset, model_directory
from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.model.describe import preset_values, read_model_config

if TYPE_CHECKING:
    import numpy as np

WORKLOAD_FILE = "workload.json"
_STANDARD_DEVIATION = 0.02  # of random weights, as in GPT-2


@dataclass(frozen=True)
class Inputs:
    """The files of a comparison."""

    workload: Path
    model: Path
    vocab_size: int


def write_inputs(args: argparse.Namespace, folder: Path) -> Inputs:
    """Write the workload and the model that the flags describe into a folder. Raises ConfigError."""
    model = read_model_config(args.model)
    workload = workload_from_args(args, vocab_size=model.vocab_size, max_model_len=model.max_positions, rate=None)
    path = folder / WORKLOAD_FILE
    write_workload(path, workload, {**workload_settings(args), "model": args.model, "seed": args.seed})
    return Inputs(path.absolute(), model_for_peers(args.model, args.seed, folder / "model"), model.vocab_size)


def write_workload(path: Path, workload: Sequence[WorkloadRequest], settings: dict[str, Any]) -> None:
    """Write a workload: its settings, and for each request the arrival in seconds, the ids and the output tokens."""
    requests = [
        {"arrival": one.arrival, "prompt_ids": list(one.prompt_ids), "num_output": one.num_output} for one in workload
    ]
    path.write_text(json.dumps({"settings": settings, "requests": requests}), encoding="utf-8")


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Read what `write_workload` wrote."""
    requests = json.loads(path.read_text(encoding="utf-8"))["requests"]
    return [WorkloadRequest(one["arrival"], tuple(one["prompt_ids"]), one["num_output"]) for one in requests]


def model_for_peers(model: str, seed: int, folder: Path) -> Path:
    """Return the directory of a model in Hugging Face's format; that of a preset is written into `folder`.

    Args:
        model: a model directory, "demo", or "preset:<name>", whose weights are random.
        seed: seed of random weights.
        folder: made if it does not exist.

    Raises:
        ConfigError: the model is unknown, a toy without weights, or a preset of another family than GPT-2 and Llama.
    """
    if not is_preset(model):
        return Path(model_directory(model)).absolute()
    config = read_model_config(model)
    hf = preset_values(model)
    import numpy as np  # help comes without it
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    weights = {name: _values(name, shape, random) for name, shape in checkpoint_shapes(config).items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = {**hf, "architectures": [_family_of(config).architecture]}
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    write_tokenizer(folder, config.vocab_size)
    return folder.absolute()


def _values(name: str, shape: tuple[int, ...], random: "np.random.Generator") -> "np.ndarray":
    """Return random matrices, biases of zero and scales of one."""
    import numpy as np

    if len(shape) > 1:
        return random.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
    return np.full(shape, 0 if name.endswith(".bias") else 1, np.float32)


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors in Hugging Face's format.

    Raises:
        ConfigError: the model is of another family than GPT-2 and Llama.
    """
    return _family_of(config).shapes(config)


def _gpt2(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    embed, mlp = config.embed_dim, config.mlp_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, embed),
        "wpe.weight": (config.max_positions, embed),
    }
    linear = {
        "attn.c_attn": (embed, 3 * embed),
        "attn.c_proj": (embed, embed),
        "mlp.c_fc": (embed, mlp),
        "mlp.c_proj": (mlp, embed),
    }
    for layer in range(config.num_layers):
        for name, shape in linear.items():
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (embed,), f"h.{layer}.{name}.bias": (embed,)}
    shapes |= {"ln_f.weight": (embed,), "ln_f.bias": (embed,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def _llama(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    embed, mlp = config.embed_dim, config.mlp_dim
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, embed)}
    each = {
        "self_attn.q_proj": (heads, embed),
        "self_attn.k_proj": (kv_heads, embed),
        "self_attn.v_proj": (kv_heads, embed),
        "self_attn.o_proj": (embed, heads),
        "mlp.gate_proj": (mlp, embed),
        "mlp.up_proj": (mlp, embed),
        "mlp.down_proj": (embed, mlp),
        "input_layernorm": (embed,),
        "post_attention_layernorm": (embed,),
    }
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in each.items()}
    shapes["model.norm.weight"] = (embed,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, embed)
    return shapes


class RandomFamily(NamedTuple):
    """A family with presets of random weights: its class in transformers, and the shapes of its tensors."""

    architecture: str
    shapes: Callable[[ModelConfig], dict[str, tuple[int, ...]]]


_FAMILIES = {"gpt2": RandomFamily("GPT2LMHeadModel", _gpt2), "llama": RandomFamily("LlamaForCausalLM", _llama)}


def _family_of(config: ModelConfig) -> RandomFamily:
    if config.family not in _FAMILIES:
        known = " or ".join(_FAMILIES)
        message = f"model is of the family {config.family}, which has no random weights here; give one of {known}"
        raise ConfigError(message, param="model")
    return _FAMILIES[config.family]
