"""Random models as GGUF files, most of them quantised by llama.cpp's own program."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from lab.peers.tokenizer import tokens_and_merges
from orca_jax.values.errors import OrcaError

TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")


class _Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    positions: int
    experts: int = 0  # of a layer; 0: one MLP without a router
    chosen: int = 0  # experts of a token
    architecture: str = "llama"
    head_dim: int = 0  # 0: the width, shared by the heads

    @property
    def of_head(self) -> int:
        """Numbers of a head."""
        return self.head_dim or self.width // self.heads


SMALL = _Shape(2048, 12, 32, 4, 5632, 32_000, 32_768)
OTHERS = {
    "7B-Q4_0": _Shape(4096, 32, 32, 32, 11_008, 32_000, 4096),
    "experts-Q4_0": _Shape(1024, 12, 16, 4, 768, 32_000, 32_768, experts=16, chosen=4),
    "vocabulary-Q4_0": _Shape(1024, 12, 16, 4, 2816, 250_000, 32_768),
    "llama3.2-1B-Q4_K_M": _Shape(2048, 16, 32, 8, 8192, 128_256, 131_072),
    "qwen3-0.6B-Q8_0": _Shape(
        1024, 28, 16, 8, 3072, 151_936, 40_960, architecture="qwen3", head_dim=128
    ),
}
"""Other shapes: of 3.8 GB, a mixture, one with a large vocabulary, and those of two published models.

Those of Q4_0 have random bits, so they are written without llama.cpp.
"""
_SEED, _STANDARD_DEVIATION = 0, 0.02


def random_file(kind: str, folder: Path, quantise: Path) -> Path:
    """Return a file of a Llama with 594 million tied random parameters, or of another shape, written at the first use.

    Args:
        kind: one of `TYPES`, or of `OTHERS`.
        folder: the place of the files, made if it does not exist.
        quantise: the program `llama-quantize`.

    Raises:
        OrcaError: the program failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = OTHERS.get(kind, SMALL)
    model, _, stored = kind.rpartition("-")
    name = f"llama-{model or '594M'}"
    path = folder / f"{name}-{stored}.gguf"
    if kind in OTHERS and stored == "Q4_0":
        return _written(path, shape, stored)
    plain = _written(folder / f"{name}-BF16.gguf", shape, "BF16")
    if not path.exists():
        done = subprocess.run(
            [quantise, plain, path, stored], capture_output=True, text=True, check=False
        )
        if done.returncode:
            path.unlink(missing_ok=True)
            raise OrcaError(
                f"llama-quantize ended with code {done.returncode}: {done.stderr[-300:]}"
            )
    return path


def _written(path: Path, shape: _Shape, kind: str) -> Path:
    if not path.exists():
        part = path.with_suffix(".part")
        _write(part, shape, kind)
        part.rename(path)
    return path


def _write(path: Path, model: _Shape, kind: str) -> None:
    """Write the file in BF16 or Q4_0, with a tokenizer whose text is arbitrary."""
    import gguf  # help comes without both
    import numpy as np

    width = model.width
    head_dim = model.of_head
    writer = gguf.GGUFWriter(str(path), model.architecture)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.positions)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(model.inner)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.chosen)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    tokens, merges = tokens_and_merges(model.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * model.vocabulary)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(model.vocabulary - 1)
    random = np.random.default_rng(_SEED)
    stored = gguf.GGMLQuantizationType[kind]

    def values(shape: tuple[int, ...]) -> np.ndarray:
        if kind == "BF16":
            drawn = random.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
            return gguf.quants.quantize(drawn, stored)
        *rows, columns = shape
        blocks = random.integers(0, 256, (*rows, columns // 32, 18), np.uint8)
        # of numbers from -8 to 7
        blocks[..., :2] = np.array([_STANDARD_DEVIATION / 4], "<f2").view(np.uint8)
        return blocks.reshape(*rows, -1)

    for name, shape in _shapes(model).items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        elif name.endswith("ffn_gate_inp"):
            writer.add_tensor(
                f"{name}.weight", random.standard_normal(shape, np.float32) / np.float32(width**0.5)
            )
        else:
            writer.add_tensor(f"{name}.weight", values(shape), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(model: _Shape) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by name."""
    head_dim = model.of_head
    queries = model.heads * head_dim
    kv = model.kv_heads * head_dim
    width = model.width
    inner = model.inner
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, width),
        "attn_k": (kv, width),
        "attn_v": (kv, width),
        "attn_output": (width, queries),
        "attn_norm": (width,),
        "ffn_norm": (width,),
    }
    if model.architecture == "qwen3":
        layer |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    mlp: dict[str, tuple[int, ...]] = {
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    if model.experts:
        mlp = {f"{name}_exps": (model.experts, *shape) for name, shape in mlp.items()}
        mlp["ffn_gate_inp"] = (model.experts, width)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (model.vocabulary, width),
        "output_norm": (width,),
    }
    block = {**layer, **mlp}
    for number in range(model.layers):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in block.items()}
    return shapes
