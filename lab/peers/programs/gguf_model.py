"""Writes a GPT-2 model in Hugging Face's format as GGUF, the format of llama.cpp.

Needs the packages gguf and safetensors. Matrices have the type of the model; biases, scales and positions stay float32,
as in llama.cpp's own conversion.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_OUTSIDE = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
_IN_LAYERS = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
_FILE_TYPES = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Write the model of a directory to a file. Ends the program if the model is not a GPT-2."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "gpt2":
        raise SystemExit(
            f"error: model_type is {config.get('model_type')!r}; this program writes GPT-2 alone as GGUF"
        )
    writer = gguf.GGUFWriter(str(path), "gpt2")
    embed = config["n_embd"]
    writer.add_name(model.name)
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(embed)
    writer.add_feed_forward_length(config.get("n_inner") or 4 * embed)
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
    writer.add_file_type(_FILE_TYPES[dtype])
    _add_tokenizer(writer, model / "tokenizer.json", config["vocab_size"])
    with safe_open(model / "model.safetensors", framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safetensors' file is no mapping
            found = _named(name.removeprefix("transformer."))
            if found is not None:
                _add_tensor(writer, found, tensors.get_tensor(name), dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _named(name: str) -> str | None:
    """The name in GGUF of a tensor of GPT-2; None for the masks that some checkpoints hold."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    first, _, rest = module.removeprefix("h.").partition(".")
    return f"blk.{first}.{_IN_LAYERS[rest]}.{kind}" if rest in _IN_LAYERS else None


def _add_tensor(writer: Any, name: str, values: np.ndarray, dtype: str) -> None:
    """Add a tensor; the linear layers of GPT-2 have their inputs first, and those of GGUF last."""
    values = values.astype(np.float32)
    if values.ndim == 1 or name == "position_embd.weight":
        writer.add_tensor(name, values)
        return
    if name != "token_embd.weight":
        values = np.ascontiguousarray(values.T)
    kind = _TYPES[dtype]
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _add_tokenizer(writer: Any, path: Path, vocab_size: int) -> None:
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)[:vocab_size]
    tokens += [f"token {number}" for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    )
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_bos_token_id(vocab_size - 1)
    writer.add_add_bos_token(False)
